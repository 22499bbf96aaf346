"""Which curves a run has: what is drawn on which axes, and in which unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plimsoll.run.rows import Row
from plimsoll.run.standing import BEFORE_STEPS


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    unit: the label of the vertical axis, of all that is drawn there.
    series: the metrics to draw, each with its name in the legend.
    stacked: draw areas that add up, instead of lines. from_zero: of amounts, which a cut axis would
    make look as if they changed more than they do.
    """

    title: str
    unit: str
    series: Mapping[str, str]
    stacked: bool = False
    from_zero: bool = False


def both(title: str, unit: str, name: str) -> Panel:
    """A metric in training, where it has one, and on what is held out."""
    return Panel(title, unit, {name: "training", f"eval/{name}": "held out"})


def alone(title: str, unit: str, name: str) -> Panel:
    return Panel(title, unit, {name: name})


def implicit_rewards(better: str, worse: str) -> Panel:
    names = {f"rewards/{name}": name for name in (better, worse)}
    return Panel("Implicit rewards in training", "per response", names)


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


def metric_names(rows: Iterable[Row], prefix: str) -> list[str]:
    """Those that begin so, in the order in which they first came."""
    found = dict.fromkeys(name for row in rows for name in row)
    return [name for name in found if name.startswith(prefix)]
