"""Which curves a run has: what is drawn on which axes, and in which unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
