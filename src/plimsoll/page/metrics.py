"""The metrics of a whole run: evaluations, time by phase, and panels of curves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import isnan, nan

from plimsoll.run.json_lines import JsonRow
from plimsoll.run.step_report import BEFORE_STEPS, Figure, figures
from plimsoll.spec.job import Panel


def metric_names(rows: Iterable[JsonRow], prefix: str) -> list[str]:
    """Return the metrics that begin with `prefix`, in the order of their first appearance."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if name.startswith(prefix)]


def evaluations(rows: Iterable[JsonRow], best_step: int | None) -> dict[str, JsonRow]:
    """Return the first, the best (if known) and the last evaluation by a label, each once."""
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
    """Return the figures of each metric in the evaluations; None if an evaluation lacks it."""
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


def curve_panels(job_panels: Sequence[Panel], rows: Sequence[JsonRow]) -> tuple[Panel, ...]:
    """Return a job's panels, with one for each reward part in the rows after the first."""
    return (*job_panels[:1], *_parts(rows), *job_panels[1:])


def _parts(rows: Sequence[JsonRow]) -> Sequence[Panel]:
    """Return a panel for each reward part; none if there is one part, which is the reward."""
    names = [name.removeprefix("reward/") for name in metric_names(rows, "reward/")]
    series_of = {name: {f"reward/{name}": "training", f"eval/{name}": "held out"} for name in names}
    parts = [Panel(f"Reward: {name}", "per response", series) for name, series in series_of.items()]
    return parts if len(parts) > 1 else ()


def time_panels(rows: Sequence[JsonRow]) -> tuple[Panel, ...]:
    """Return the panels of a step's time by phase, the speed, and the use of the cards."""
    phases = {name: name.removeprefix("seconds/") for name in metric_names(rows, "seconds/")}
    steps = {name: phase for name, phase in phases.items() if phase not in BEFORE_STEPS}
    return (
        Panel("Time of a step by phase", "seconds", steps, stacked=True),
        Panel("Speed", "tokens/s", {"tokens_per_second": "speed"}, from_zero=True),
        Panel("Use of the cards", "share", {"mfu": "MFU", "gpu_busy": "busy"}, from_zero=True),
    )
