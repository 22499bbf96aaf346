"""Curves and figures of metrics, before and after, of runs that are compared with each other.

    python examples/curves.py curves.svg eval/right "with a tool=runs/a" "without=runs/b"

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

from plimsoll.algorithm.figures import mean_interval
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.run.chart import Chart, ChartLine, draw_charts
from plimsoll.run.directory import existing_run
from plimsoll.run.files import write_whole
from plimsoll.run.json_lines import JsonRow, read_rows

Runs = Sequence[Sequence[JsonRow]]
"""The rows of metrics of each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. arguments: default sys.argv[1:]."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("picture", type=Path, help="the SVG file that is written")
    parser.add_argument("metrics", help="of held-out rows, such as eval/reward, or METRIC,...")
    parser.add_argument("runs", nargs="+", help="LABEL=DIRECTORY, or with several DIRECTORY,...")
    options = parser.parse_args(arguments)
    try:
        labelled = dict(map(_labelled, options.runs))
        metrics = options.metrics.split(",")
        for label, runs in labelled.items():
            for metric in metrics:
                print(told(label, runs, metric))
        write_whole(options.picture, draw_charts(charts_of(labelled, metrics)))
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


def _values(run: Sequence[JsonRow], metric: str) -> list[float]:
    return [row[metric] for row in run if row.get(metric) is not None]


def charts_of(labelled: Mapping[str, Runs], metrics: Sequence[str]) -> list[Chart]:
    """Return a chart for the reward and for each metric, with a line for each label."""
    titles = {"reward": "Reward in training"} | {m: f"{m} on held-out rows" for m in metrics}
    charts = []
    for name, title in titles.items():
        lines = [_line(label, runs, name) for label, runs in labelled.items()]
        charts.append(Chart(title, "step", "mean", [line for line in lines if line.points]))
    return [chart for chart in charts if chart.lines]


def _line(label: str, runs: Runs, name: str) -> ChartLine:
    """Return the mean of runs at each step, with its interval."""
    steps = sorted({row["step"] for run in runs for row in run})
    means = {
        s: _mean([row for run in runs for row in run if row["step"] == s], name) for s in steps
    }
    means = {step: mean for step, mean in means.items() if mean}
    intervals = [
        (step, mean[f"{name}_low"], mean[f"{name}_high"])
        for step, mean in means.items()
        if f"{name}_low" in mean
    ]
    return ChartLine(label, [(step, mean[name]) for step, mean in means.items()], intervals)


def _mean(rows: Sequence[JsonRow], name: str) -> Mapping[str, float]:
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
