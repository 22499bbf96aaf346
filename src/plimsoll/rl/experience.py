"""The source of a step's scored trajectories, which the loop does not make itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from plimsoll.records import Trajectory
from plimsoll.run.state import RunState


@dataclass(frozen=True)
class Experience:
    """What a step learns from.

    Attributes:
        trajectories: group by group, with all parts of their rewards.
        greedy: the greedy response to each group's prompt, if the advantage needs it.
        prompts: the number of prompts that the step took of the data.
        metrics: figures of how the trajectories came about.
    """

    trajectories: list[Trajectory]
    greedy: Sequence[Trajectory]
    prompts: int
    metrics: Mapping[str, float]


class Source(Protocol):
    """Engines that sample (live.py), or a run that stored what its engines sampled (replay.py).

    The defaults are those of a run without engines.
    """

    def begin(self, state: RunState) -> None:
        """Get ready to give what follows a state, whose weights the ranks have."""

    def draw(self, state: RunState) -> Experience:
        """Return what the step after a state learns from."""
        ...

    def renew(self, step: int) -> Mapping[str, float]:
        """Take what the ranks learned in a step; return the metrics of that."""
        return {}

    def evaluate(self) -> Mapping[str, float]:
        """Return the figures of the held-out prompts; the rules refuse them without engines."""
        return {}

    def rewards(self) -> Mapping[str, Mapping[str, float]]:
        """Return the running statistics of rewards, as `RunState` keeps them."""
        return {}
