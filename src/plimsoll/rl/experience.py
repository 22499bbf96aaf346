"""Define where the training loop gets the scored trajectories of a step from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from plimsoll.records import Trajectory
from plimsoll.run.state import RunState


@dataclass(frozen=True)
class Experience:
    """The scored trajectories that a step learns from.

    Attributes:
        trajectories: the trajectories, group by group, with all parts of their rewards.
        baselines: the reward of the greedy response to each group's prompt; empty if the advantage
            needs none.
        prompts: the number of prompts that the step drew from the data.
        metrics: metrics of the sampling, by name.
        unlearned: see `RunState`.
    """

    trajectories: list[Trajectory]
    baselines: Mapping[int, float]
    prompts: int
    metrics: Mapping[str, float]
    unlearned: tuple[int, ...] = ()


class Source(Protocol):
    """A source of trajectories: engines that sample (live.py), or a stored run.

    The methods that have a body here are right for a run without engines.
    """

    def begin(self, state: RunState) -> None:
        """Get ready to continue after `state`; the ranks have loaded the weights of that state."""

    def draw(self, state: RunState) -> Experience:
        """Return the trajectories of the step after `state`."""
        ...

    def renew(self, step: int) -> Mapping[str, float]:
        """Take over the ranks' weights after a step; return metrics of the transfer by name."""
        return {}

    def revive(self, version: int) -> list[str]:
        """Start dead engines again with the ranks' weights; return the names of the dead."""
        return []

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Return the figures of held-out prompts after a step; refused without engines."""
        return {}

    def rewards(self) -> Mapping[str, Mapping[str, float]]:
        """Return the running statistics of rewards, as `RunState` keeps them."""
        return {}

    def close(self) -> None:
        """End what goes on beside the steps."""
