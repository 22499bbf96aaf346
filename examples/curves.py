"""Curves and figures of metrics, before and after, of runs that are compared with each other.

    python examples/curves.py curves.png eval/right "with a tool=runs/a" "without=runs/b"

After each label stands one run, or several that differ by their seed alone: then the curve is their
mean, its band the 95 % confidence interval of that (Student's), and so is the printed difference
between the first and the last evaluation. Of one run the band is the run's own interval.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from plimsoll.algorithm.interval import mean_interval
from plimsoll.commands.report.curves import draw_curves
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.run.directory import existing_run
from plimsoll.run.json_lines import Row, read_rows
from plimsoll.spec.job import Panel

Runs = Sequence[Sequence[Row]]
"""The rows of metrics of each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. arguments: default sys.argv[1:]."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("picture", type=Path, help="the PNG that is written")
    parser.add_argument("metrics", help="of held-out rows, such as eval/reward, or METRIC,...")
    parser.add_argument("runs", nargs="+", help="LABEL=DIRECTORY, or with several DIRECTORY,...")
    options = parser.parse_args(arguments)
    try:
        labelled = dict(map(_labelled, options.runs))
        metrics = options.metrics.split(",")
        for label, runs in labelled.items():
            for metric in metrics:
                print(told(label, runs, metric))
        draw_curves(*together(labelled, options.picture, metrics))
    except PlimsollError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _labelled(text: str) -> tuple[str, Runs]:
    label, found, directories = text.partition("=")
    if not found:
        raise ConfigError(f"{text!r} has no label: write LABEL=DIRECTORY, as in sft=runs/sft.")
    return label, [read_rows(existing_run(Path(d)).metrics_path) for d in directories.split(",")]


def told(label: str, runs: Runs, metric: str) -> str:
    """The metric at the first and the last evaluation of each run, and what lies between."""
    ends = [(own[0], own[-1]) for run in runs if (own := _values(run, metric))]
    if len(ends) < len(runs):
        raise ConfigError(f"A run of {label!r} has no {metric} in its metrics.jsonl.")
    differences = [after - before for before, after in ends]
    interval = mean_interval(differences, range(len(ends)))
    each = ", ".join(f"{before:.3f} -> {after:.3f}" for before, after in ends)
    band = "" if interval is None else f", 95 % interval {interval[0]:+.3f} to {interval[1]:+.3f}"
    return f"{label}, {metric}: {each}; difference {fmean(differences):+.3f}{band}"


def _values(run: Sequence[Row], metric: str) -> list[float]:
    return [row[metric] for row in run if row.get(metric) is not None]


def together(
    labelled: Mapping[str, Runs], picture: Path, metrics: Sequence[str]
) -> tuple[Sequence[Row], Path, Sequence[Panel]]:
    """What `draw_curves` takes: rows by step, where metrics have their label before their name."""
    rows: dict[int, dict[str, float]] = {}
    for label, runs in labelled.items():
        for step in sorted({row["step"] for run in runs for row in run}):
            own = [row for run in runs for row in run if row["step"] == step]
            found = rows.setdefault(step, {"step": step})
            for name in ("reward", *metrics):
                found |= {f"{label}/{key}": value for key, value in _mean(own, name).items()}
    titles = {"reward": "Reward in training"} | {m: f"{m} on held-out rows" for m in metrics}
    panels = [
        Panel(title, "mean", {f"{label}/{name}": label for label in labelled})
        for name, title in titles.items()
    ]
    return [rows[step] for step in sorted(rows)], picture, panels


def _mean(rows: Sequence[Row], name: str) -> Mapping[str, float]:
    """Over runs, with its interval; of a single run with the run's own."""
    if len(rows) == 1:
        keys = (name, f"{name}_low", f"{name}_high")
        return {key: rows[0][key] for key in keys if rows[0].get(key) is not None}
    values = _values(rows, name)
    if not values:
        return {}
    interval = mean_interval(values, range(len(values)))
    bounds = {} if interval is None else {f"{name}_low": interval[0], f"{name}_high": interval[1]}
    return {name: fmean(values)} | bounds


if __name__ == "__main__":
    sys.exit(main())
