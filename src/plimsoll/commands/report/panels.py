"""Which curves a run has, by what its rows hold."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.commands.report.metrics import metric_names
from plimsoll.run.json_lines import Row
from plimsoll.run.step_report import BEFORE_STEPS
from plimsoll.spec.panels import Panel


def curve_panels(own: Sequence[Panel], rows: Sequence[Row]) -> tuple[Panel, ...]:
    """What a job learns by, and the parts of the reward, each in a unit of its own; those that have
    data are drawn. own: the job's."""
    return (*own[:1], *_parts(rows), *own[1:])


def _parts(rows: Sequence[Row]) -> Sequence[Panel]:
    """A single part is the reward itself, but for its weight."""
    names = [name.removeprefix("reward/") for name in metric_names(rows, "reward/")]
    return [_part(name) for name in names] if len(names) > 1 else ()


def _part(name: str) -> Panel:
    series = {f"reward/{name}": "training", f"eval/{name}": "held out"}
    return Panel(f"Reward: {name}", "per response", series)


def time_panels(rows: Sequence[Row]) -> tuple[Panel, ...]:
    """Where the time of the steps went; reading data and loading are no part of any step."""
    phases = {name: name.removeprefix("seconds/") for name in metric_names(rows, "seconds/")}
    steps = {name: phase for name, phase in phases.items() if phase not in BEFORE_STEPS}
    return (
        Panel("Time of a step by phase", "seconds", steps, stacked=True),
        Panel("Speed", "tokens/s", {"tokens_per_second": "speed"}, from_zero=True),
    )


def memory_panel(peaks: Sequence[Row]) -> Panel:
    """Of the rows of `peaks_by_step`."""
    kinds = [name for name in metric_names(peaks, "") if name != "step"]
    return Panel("Memory at its fullest", "GB", {kind: kind for kind in kinds}, from_zero=True)
