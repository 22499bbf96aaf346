"""The metrics of a run as JSON: evaluations, time by phase, and the curves in panels.

Curves of long runs are reduced to the points that show their shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import isfinite, isnan, nan
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from plimsoll.config.yaml_tree import value_at
from plimsoll.jobs import JOBS
from plimsoll.page.ledger import drop_lone_nodes
from plimsoll.page.watched import Figures, Watched
from plimsoll.resolve.job import Panel
from plimsoll.run.displays import BEFORE_STEPS, Figure, figures
from plimsoll.run.health import RANGES
from plimsoll.run.json_lines import JsonRow
from plimsoll.run.ledger import process_kind


def metric_names(rows: Iterable[JsonRow], prefix: str) -> list[str]:
    """Return the metrics that begin with `prefix`, in the order of their first appearance."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if name.startswith(prefix)]


def evaluations(rows: Iterable[JsonRow], best_step: int | None) -> dict[str, JsonRow]:
    """Return the first, the best (if known) and the last evaluation, by label, without repeats."""
    by_step = {row["step"]: row for row in rows if metric_names([row], "eval/")}
    if len(by_step) < 2:
        return {f"step {step}": row for step, row in by_step.items()}
    steps = {"first": min(by_step), "best": best_step, "last": max(by_step)}
    chosen_steps = sorted({step for step in steps.values() if step in by_step})
    names = [" and ".join(name for name in steps if steps[name] == step) for step in chosen_steps]
    return {
        f"{name}, step {step}": by_step[step]
        for name, step in zip(names, chosen_steps, strict=True)
    }


def held_out_figures(evaluated: Collection[JsonRow]) -> dict[str, list[Figure | None]]:
    """Return, by metric, a list with its figure in each evaluation; None if it is missing."""
    per_evaluation = [
        figures({n: nan if row[n] is None else row[n] for n in metric_names([row], "eval/")})
        for row in evaluated
    ]
    names = dict.fromkeys(name for row_figures in per_evaluation for name in row_figures)
    return {name: [row_figures.get(name) for row_figures in per_evaluation] for name in names}


def number_text(figure: Figure) -> str:
    """Return a figure's value as text, such as `0.83`."""
    return "NaN" if isnan(figure.value) else f"{figure.value:.4g}"


def bounds_text(figure: Figure) -> str:
    """Return a figure's interval as text, such as `0.79 to 0.87`; empty if it has none."""
    if figure.interval is None or any(map(isnan, figure.interval)):
        return ""
    return "{:.3g} to {:.3g}".format(*figure.interval)


def curve_panels(
    job_panels: Sequence[Panel], rows: Sequence[JsonRow], unweighted: Collection[str] = ()
) -> tuple[Panel, ...]:
    """Return a job's panels, with one for each reward part in the rows after the first.

    A single part is the reward and has none. `unweighted` parts have a weight of 0: they are
    metrics, and come last.
    """
    names = [name.removeprefix("reward/") for name in metric_names(rows, "reward/")]
    if len(names) < 2:
        return tuple(job_panels)
    parts, metrics = [], []
    for name in names:
        series = {f"reward/{name}": "training", f"eval/{name}": "held out"}
        if name in unweighted:
            title = f"Metric: {name} (a reward of weight 0)"
            metrics.append(Panel(title, "per response", series))
        else:
            parts.append(Panel(f"Reward: {name}", "per response", series))
    return (*job_panels[:1], *parts, *job_panels[1:], *metrics)


def unweighted_parts(run: Watched) -> list[str]:
    """Return the names of a run's reward parts whose weight is 0 in its config."""
    rewards = value_at(run.settings, ("rewards",))
    parts = rewards.items() if isinstance(rewards, Mapping) else ()
    return [name for name, part in parts if value_at(part, ("weight",)) == 0]


def time_panels(rows: Sequence[JsonRow]) -> tuple[Panel, ...]:
    """Return the panels of a step's time by phase, the speed, and the use of the cards."""
    phases = {name: name.removeprefix("seconds/") for name in metric_names(rows, "seconds/")}
    steps = {name: phase for name, phase in phases.items() if phase not in BEFORE_STEPS}
    return (
        Panel("Time of a step by phase", "seconds", steps, stacked=True),
        Panel("Speed", "tokens/s", {"tokens_per_second": "speed"}, from_zero=True),
        Panel("Use of the cards", "share", {"mfu": "MFU", "gpu_busy": "busy"}, from_zero=True),
    )


CurveSection = Literal["learning", "health", "time", "memory", "other"]
SECTIONS: tuple[CurveSection, ...] = get_args(CurveSection)
BUCKETS = 400
"""Number of buckets of a longer curve; each keeps its lowest and its highest value."""
_DIGITS = 6
HealthyBand = tuple[float | None, float | None]


Curves = tuple[Figures, Callable[[str], Figures], Sequence[Panel]]
"""The curves of a run in a section: the steps, shape [S], a function that returns the values of a
metric at the steps, shape [S], and the panels."""


def curves(
    runs: Sequence[Watched],
    section: CurveSection,
    steps: tuple[float, float],
    buckets: int = BUCKETS,
) -> list[dict[str, Any]]:
    """Return the panels of a section, each with a table for every run that has data.

    A stacked panel belongs to one run, so each run gets its own. `steps` are the first and the last
    step to include.
    """
    compared = [run.metrics.names for run in runs]
    per_run = [_curves_of(run, section, compared) for run in runs]
    merged: dict[str, Panel] = {}
    owners: dict[str, list[int]] = {}
    for place, (run, run_curves) in enumerate(zip(runs, per_run, strict=True)):
        for panel in run_curves[2]:
            is_single = panel.stacked and len(runs) > 1
            title = f"{panel.title}: {run.name}" if is_single else panel.title
            series = {**merged[title].series, **panel.series} if title in merged else panel.series
            merged[title] = replace(panel, title=title, series=series)
            owners.setdefault(title, []).append(place)
    panels = []
    for title, panel in merged.items():
        tables = {i: _table(per_run[i], panel, steps, buckets) for i in owners[title]}
        run_tables = [
            {"run": i, **table, **_other_axes(runs[i], table["x"])}
            for i, table in tables.items()
            if table is not None
        ]
        if run_tables:
            described = _describe_panel(panel, runs[run_tables[0]["run"]])
            panels.append({**described, "tables": run_tables})
    return panels


def _curves_of(run: Watched, section: CurveSection, compared: Sequence[JsonRow]) -> Curves:
    """Return a run's curves in a section; `compared` has the metric names of all runs."""
    if section == "memory":
        return _peaks(run)
    metrics = run.metrics
    steps = metrics.column("step")
    if section == "time":  # 0 is an evaluation before training
        steps = np.where(steps > 0, steps, np.nan)
    return steps, metrics.column, _panels(run, section, compared)


def _peaks(run: Watched) -> Curves:
    """Return the peaks of each kind of process; earlier versions wrote those of each process."""
    kinds = dict.fromkeys(process_kind(row.process) for row in drop_lone_nodes(run.ledger.rows))
    names = metric_names([run.metrics.names], "memory_bytes/")

    def peaks(kind: str) -> Figures:
        nothing = np.full(len(run.metrics.rows), np.nan)
        of_kind = (name for name in names if process_kind(name.partition("/")[2]) == kind)
        return reduce(np.fmax, map(run.metrics.column, of_kind), nothing) / 1e9

    panel = Panel("Memory at its fullest", "GB", {kind: kind for kind in kinds}, from_zero=True)
    return run.metrics.column("step"), peaks, [panel]


def _panels(run: Watched, section: CurveSection, compared: Sequence[JsonRow]) -> list[Panel]:
    """Return the panels of a section.

    Every metric is in one section; the seconds of phases before the steps are in none. A run's only
    reward part has a panel if other runs on the page have several parts.
    """
    names = run.metrics.names
    panels = JOBS[run.job].panels if run.job else ()
    learning = list(curve_panels(panels, compared, unweighted_parts(run)))
    taken = _series(learning)
    for name in names:
        ends = {f"{name}_low", f"{name}_high"}
        taken |= ends if ends <= names.keys() else set()
    held_out = [name for name in metric_names([names], "eval/") if name not in taken]
    learning += [_panel_of(name, f"Held out: {name.removeprefix('eval/')}") for name in held_out]
    healthy = {n: limits for n, limits in RANGES.items() if n in names and n not in taken}
    health = [_panel_of(name, name, limits.what) for name, limits in healthy.items()]
    time = list(time_panels([names]))
    taken |= _series([*learning, *health, *time]) | {f"seconds/{phase}" for phase in BEFORE_STEPS}
    untaken = [n for n in names if n not in taken and not n.startswith("memory_bytes/")]
    rest = [_panel_of(name, name) for name in untaken]
    return {"learning": learning, "health": health, "time": time, "other": rest}[section]


def _panel_of(name: str, title: str, unit: str = "") -> Panel:
    return Panel(title, unit, {name: name})


def _series(panels: Sequence[Panel]) -> set[str]:
    return {name for panel in panels for name in panel.series}


def _describe_panel(panel: Panel, run: Watched) -> dict[str, Any]:
    return {
        "title": panel.title,
        "unit": panel.unit,
        "series": [{"name": name, "label": label} for name, label in panel.series.items()],
        "stacked": panel.stacked,
        "fromZero": panel.from_zero,
        "band": _band(panel, run),
    }


def _band(panel: Panel, run: Watched) -> HealthyBand | None:
    """Return the healthy range of a panel's first metric at the last step; None for an open end."""
    healthy = RANGES.get(next(iter(panel.series)))
    if healthy is None:
        return None
    last_values = {name: value for name, value in run.metrics.last.items() if value is not None}
    low, high = healthy.bounds(last_values)
    ends = (low if isfinite(low) else None, high if isfinite(high) else None)
    return None if ends == (None, None) else ends


def _table(
    run_curves: Curves, panel: Panel, steps: tuple[float, float], buckets: int
) -> dict[str, Any] | None:
    """Return the points of a panel, or None if there are none.

    `y`, `low` and `high` have a list for each series. `together` is the number of steps of which a
    point is the mean.
    """
    all_steps, column, _ = run_curves
    inside = (all_steps >= steps[0]) & (all_steps <= steps[1])
    x = all_steps[inside]
    y = [column(name)[inside] for name in panel.series]
    if not any(np.isfinite(values).any() for values in y):
        return None
    if panel.stacked:
        together = -(-len(x) // buckets)
        starts = np.arange(0, len(x), together)
        means = [_means(np.nan_to_num(values), starts) for values in y]
        return {"x": _numbers(x[starts]), "y": [*map(_numbers, means)], "together": together}
    chosen = np.unique(np.concatenate([extremes(values, buckets) for values in y]))
    ends = {
        end: [_end(column(f"{name}_{end}")[inside][chosen]) for name in panel.series]
        for end in ("low", "high")
    }
    return {"x": _numbers(x[chosen]), "y": [_numbers(values[chosen]) for values in y], **ends}


def _other_axes(run: Watched, steps: Sequence[float | None]) -> dict[str, list[float | None]]:
    """Return the hours and the tokens of a run up to each of these steps."""
    metrics = run.metrics
    phases = [metrics.column(name) for name in metric_names([metrics.names], "seconds/")]
    sums: dict[str, Figures] = {"tokens": metrics.column("tokens")}
    if phases:
        sums["hours"] = np.nansum(np.array(phases), axis=0) / 3600
    at = np.array([np.nan if step is None else step for step in steps])
    axes = {}
    for name, column in sums.items():
        if np.isfinite(column).any():
            total = np.cumsum(np.where(np.isfinite(column), column, 0.0))
            axes[name] = _numbers(np.interp(at, metrics.column("step"), total))
    return axes


def extremes(values: Figures, buckets: int) -> NDArray[np.intp]:
    """Return the positions of the values that show the shape of a curve.

    A short curve keeps all values. A longer one is divided into buckets of equal length, and keeps
    its first and last value and the lowest and highest of each bucket.
    """
    where = np.flatnonzero(np.isfinite(values))
    size = -(-len(where) // buckets)
    if size <= 2:
        return where
    padded = np.append(where, np.full(-len(where) % size, where[-1])).reshape(-1, size)
    bucket_values, rows = values[padded], np.arange(len(padded))
    kept = (padded[rows, bucket_values.argmin(axis=1)], padded[rows, bucket_values.argmax(axis=1)])
    return np.unique(np.concatenate([where[[0, -1]], *kept]))


def _means(values: Figures, starts: NDArray[np.intp]) -> Figures:
    counts = np.diff(np.append(starts, len(values)))
    means: Figures = np.add.reduceat(values, starts) / counts
    return means


def _end(values: Figures) -> list[float | None] | None:
    return _numbers(values) if np.isfinite(values).any() else None


def _numbers(values: Figures) -> list[float | None]:
    """Return the values as numbers for JSON: None for NaN, integers for integral values."""
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    if not isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.{_DIGITS}g}")
