"""What metrics.jsonl says of a whole run: its evaluations, where its time went, and its curves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import isnan, nan

from plimsoll.run.json_lines import JsonRow
from plimsoll.run.step_report import BEFORE_STEPS, Figure, figures
from plimsoll.spec.job import Panel


def metric_names(rows: Iterable[JsonRow], prefix: str) -> list[str]:
    """Those that begin so, in the order in which they first came."""
    found = dict.fromkeys(name for row in rows for name in row)
    return [name for name in found if name.startswith(prefix)]


def total_seconds(rows: Iterable[JsonRow]) -> dict[str, float]:
    """The seconds of each phase together, in the order in which phases first came."""
    totals: dict[str, float] = {}
    for row in rows:
        for name in metric_names([row], "seconds/"):
            phase = name.removeprefix("seconds/")
            totals[phase] = totals.get(phase, 0.0) + row[name]
    return totals


def evaluations(rows: Iterable[JsonRow], best_step: int | None) -> dict[str, JsonRow]:
    """The first evaluation, that of the best step if there is one, and the last, by what they are;
    none twice."""
    found = {row["step"]: row for row in rows if metric_names([row], "eval/")}
    if len(found) < 2:
        return {f"step {step}": row for step, row in found.items()}
    steps = {"first": min(found), "best": best_step, "last": max(found)}
    shown = sorted({step for step in steps.values() if step in found})
    names = [" and ".join(name for name in steps if steps[name] == step) for step in shown]
    return {f"{name}, step {step}": found[step] for name, step in zip(names, shown, strict=True)}


def held_out_figures(shown: Collection[JsonRow]) -> dict[str, list[Figure | None]]:
    """By metric: its figure in each of the evaluations, None in those that do not have it."""
    found = [
        figures({n: nan if row[n] is None else row[n] for n in metric_names([row], "eval/")})
        for row in shown
    ]
    names = dict.fromkeys(name for own in found for name in own)
    return {name: [own.get(name) for own in found] for name in names}


def number_text(figure: Figure) -> str:
    """Such as `0.83`."""
    return "NaN" if isnan(figure.value) else f"{figure.value:.4g}"


def bounds_text(figure: Figure) -> str:
    """Such as `0.79 to 0.87`; empty where a figure has no interval."""
    if figure.interval is None or any(map(isnan, figure.interval)):
        return ""
    return "{:.3g} to {:.3g}".format(*figure.interval)


def curve_panels(own: Sequence[Panel], rows: Sequence[JsonRow]) -> tuple[Panel, ...]:
    """What a job learns by, and the parts of the reward, each in a unit of its own; those that have
    data are drawn. own: the job's. rows: of all runs that are compared, whose names count alone."""
    return (*own[:1], *_parts(rows), *own[1:])


def _parts(rows: Sequence[JsonRow]) -> Sequence[Panel]:
    """A single part is the reward itself, but for its weight."""
    names = [name.removeprefix("reward/") for name in metric_names(rows, "reward/")]
    drawn = {n: {f"reward/{n}": "training", f"eval/{n}": "held out"} for n in names}
    parts = [Panel(f"Reward: {n}", "per response", series) for n, series in drawn.items()]
    return parts if len(parts) > 1 else ()


def time_panels(rows: Sequence[JsonRow]) -> tuple[Panel, ...]:
    """Where the time of the steps went, how much came of it, and how busy cards were with it."""
    return (
        phase_panel("Time of a step by phase", rows, "seconds/"),
        Panel("Speed", "tokens/s", {"tokens_per_second": "speed"}, from_zero=True),
        Panel("Use of the cards", "share", {"mfu": "MFU", "gpu_busy": "busy"}, from_zero=True),
    )


def phase_panel(title: str, rows: Iterable[JsonRow], start: str) -> Panel:
    """The seconds of each phase of a step, whose names begin so; reading data and loading are no
    part of any step."""
    phases = {name: name.removeprefix(start) for name in metric_names(rows, start)}
    steps = {name: phase for name, phase in phases.items() if phase not in BEFORE_STEPS}
    return Panel(title, "seconds", steps, stacked=True)
