"""The curves of runs as JSON: which are drawn, and of long runs the points that show the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from plimsoll.jobs import JOBS
from plimsoll.page.comparison import drop_lone_nodes, process_kind
from plimsoll.page.metrics import curve_panels, metric_names, time_panels
from plimsoll.page.watched import Column, Watched
from plimsoll.run.health_ranges import RANGES
from plimsoll.run.json_lines import JsonRow
from plimsoll.run.step_report import BEFORE_STEPS
from plimsoll.spec.job import Panel

Section = Literal["learning", "health", "time", "memory", "other"]
SECTIONS: tuple[Section, ...] = get_args(Section)
BUCKETS = 400
"""Of a curve that is longer: of each bucket of steps its lowest and its highest value are kept."""
_DIGITS = 6
HealthyBand = tuple[float | None, float | None]


@dataclass(frozen=True)
class Curves:
    """What a run has to draw: the steps, shape [S], a column by its name, shape [S], and panels."""

    steps: Column
    column: Callable[[str], Column]
    panels: Sequence[Panel]


def curves(
    runs: Sequence[Watched], section: Section, steps: tuple[float, float], buckets: int = BUCKETS
) -> list[dict[str, Any]]:
    """The panels of a section, each with a table for every run that has it, of the steps between
    these two, both among them. What is stacked has a panel for each run."""
    compared = [run.metrics.names for run in runs]
    drawn = [_drawn(run, section, compared) for run in runs]
    merged: dict[str, Panel] = {}
    owners: dict[str, list[int]] = {}
    for place, (run, own) in enumerate(zip(runs, drawn, strict=True)):
        for panel in own.panels:
            alone = panel.stacked and len(runs) > 1
            title = f"{panel.title}: {run.name}" if alone else panel.title
            series = {**merged[title].series, **panel.series} if title in merged else panel.series
            merged[title] = replace(panel, title=title, series=series)
            owners.setdefault(title, []).append(place)
    found = []
    for title, panel in merged.items():
        tables = {i: _table(drawn[i], panel, steps, buckets) for i in owners[title]}
        shown = [{"run": i, **table} for i, table in tables.items() if table is not None]
        if shown:
            found.append({**_described(panel, runs[shown[0]["run"]]), "tables": shown})
    return found


def _drawn(run: Watched, section: Section, compared: Sequence[JsonRow]) -> Curves:
    """compared: the names of the metrics of all runs."""
    if section == "memory":
        return _peaks(run)
    metrics = run.metrics
    steps = metrics.column("step")
    if section == "time":  # 0 is an evaluation before training
        steps = np.where(steps > 0, steps, np.nan)
    return Curves(steps, metrics.column, _panels(run, section, compared))


def _peaks(run: Watched) -> Curves:
    """Of each kind of process; of nodes where one has several processes."""
    steps, peaks = run.ledger.peaks_by_step()
    told = {process_kind(row.process) for row in drop_lone_nodes(run.ledger.rows)}
    nothing = np.full(len(steps), np.nan)
    series = {kind: kind for kind in peaks if kind in told}
    panel = Panel("Memory at its fullest", "GB", series, from_zero=True)
    return Curves(steps, lambda name: peaks.get(name, nothing) / 1e9, [panel])


def _panels(run: Watched, section: Section, compared: Sequence[JsonRow]) -> list[Panel]:
    """Every metric is drawn in one section, those of phases before the steps in none. The only
    reward of a run has a panel where runs that it is compared with have others."""
    names = run.metrics.names
    learning = list(curve_panels(JOBS[run.job].panels if run.job else (), compared))
    drawn = _series(learning) | {name for name in names if _is_end(name, names)}
    held_out = [name for name in metric_names([names], "eval/") if name not in drawn]
    learning += [_alone(name, f"Held out: {name.removeprefix('eval/')}") for name in held_out]
    healthy = {n: one for n, one in RANGES.items() if n in names and n not in drawn}
    health = [_alone(name, name, one.what) for name, one in healthy.items()]
    time = list(time_panels([names]))
    drawn |= _series([*learning, *health, *time]) | {f"seconds/{phase}" for phase in BEFORE_STEPS}
    rest = [n for n in names if n not in drawn and not n.startswith("memory_bytes/")]
    other = [_alone(name, name) for name in rest]
    return {"learning": learning, "health": health, "time": time, "other": other}[section]


def _alone(name: str, title: str, unit: str = "") -> Panel:
    return Panel(title, unit, {name: name})


def _series(panels: Sequence[Panel]) -> set[str]:
    return {name for panel in panels for name in panel.series}


def _is_end(name: str, names: Mapping[str, None]) -> bool:
    """Whether it is an end of another's interval, which has two."""
    whole = name.removesuffix("_low").removesuffix("_high")
    return name != whole and {whole, f"{whole}_low", f"{whole}_high"} <= names.keys()


def _described(panel: Panel, run: Watched) -> dict[str, Any]:
    return {
        "title": panel.title,
        "unit": panel.unit,
        "series": [{"name": name, "label": label} for name, label in panel.series.items()],
        "stacked": panel.stacked,
        "fromZero": panel.from_zero,
        "band": _band(panel, run),
    }


def _band(panel: Panel, run: Watched) -> HealthyBand | None:
    """The healthy range of a panel's first metric, as it is at the last step; None: an end that
    does not matter."""
    healthy = RANGES.get(next(iter(panel.series)))
    if healthy is None:
        return None
    known = {name: value for name, value in run.metrics.last.items() if value is not None}
    low, high = healthy.bounds(known)
    ends = (low if isfinite(low) else None, high if isfinite(high) else None)
    return None if ends == (None, None) else ends


def _table(
    drawn: Curves, panel: Panel, steps: tuple[float, float], buckets: int
) -> dict[str, Any] | None:
    """The points of a panel; None where there are none. y, low, high: of each series, and of its
    interval where it has one. together: how many steps a point is the mean of."""
    inside = (drawn.steps >= steps[0]) & (drawn.steps <= steps[1])
    x = drawn.steps[inside]
    y = [drawn.column(name)[inside] for name in panel.series]
    if not any(np.isfinite(one).any() for one in y):
        return None
    if panel.stacked:
        together = -(-len(x) // buckets)
        starts = np.arange(0, len(x), together)
        means = [_means(np.nan_to_num(one), starts) for one in y]
        return {"x": _numbers(x[starts]), "y": [*map(_numbers, means)], "together": together}
    chosen = np.unique(np.concatenate([extremes(one, buckets) for one in y]))
    ends = {
        end: [_end(drawn, f"{name}_{end}", inside, chosen) for name in panel.series]
        for end in ("low", "high")
    }
    return {"x": _numbers(x[chosen]), "y": [_numbers(one[chosen]) for one in y], **ends}


def extremes(values: Column, buckets: int) -> NDArray[np.intp]:
    """Where a curve has a value; of one with more than two for each bucket the first, the last, and
    of each bucket, which are equally many values, the lowest and the highest. In their order."""
    where = np.flatnonzero(np.isfinite(values))
    size = -(-len(where) // buckets)
    if size <= 2:
        return where
    padded = np.append(where, np.full(-len(where) % size, where[-1])).reshape(-1, size)
    own, rows = values[padded], np.arange(len(padded))
    kept = (padded[rows, own.argmin(axis=1)], padded[rows, own.argmax(axis=1)])
    return np.unique(np.concatenate([where[[0, -1]], *kept]))


def _means(values: Column, starts: NDArray[np.intp]) -> Column:
    counts = np.diff(np.append(starts, len(values)))
    means: Column = np.add.reduceat(values, starts) / counts
    return means


def _end(drawn: Curves, name: str, inside: Any, chosen: Any) -> list[float | None] | None:
    values = drawn.column(name)[inside][chosen]
    return _numbers(values) if np.isfinite(values).any() else None


def _numbers(values: Column) -> list[float | None]:
    """For JSON, which has no NaN; whole numbers as such."""
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    if not isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.{_DIGITS}g}")
