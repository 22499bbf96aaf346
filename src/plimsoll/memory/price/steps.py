"""A part of a forward and its backward as a row of steps, and where it is highest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SOURCE = "counted from transformers 5's modeling files and PyTorch's derivatives.yaml"


@dataclass(frozen=True)
class Step:
    """One step of a layer, in bytes.

    part: what it is counted under in words. saved: kept by the forward for the backward.
    scratch: what its backward allocates while `saved` is still there. gradient: of a weight, in
    flight at the same time. forward: all that its forward makes, where that may be the highest.
    """

    part: str
    saved: int
    scratch: int
    gradient: int = 0
    forward: int = 0


@dataclass(frozen=True)
class Summit:
    """Where a layer is highest: as Step, but `saved` is that of all steps done or not undone."""

    where: str
    saved: int
    scratch: int
    gradient: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.saved + self.scratch + self.gradient


def saved_bytes(steps: Iterable[Step]) -> int:
    """What the steps keep for their backward."""
    return sum(step.saved for step in steps)


def summit(steps: tuple[Step, ...]) -> Summit:
    """The highest point of a forward and of its backward from the last step to the first."""
    return max(_points(steps), key=lambda point: point.bytes)


def _points(steps: tuple[Step, ...]) -> Iterator[Summit]:
    saved = 0
    for step in steps:
        yield Summit(f"the forward of {step.part}", saved, step.forward, 0)
        saved += step.saved
        yield Summit(f"the backward of {step.part}", saved, step.scratch, step.gradient)
