"""Where roles live, behind one interface: the recipe does not know whether there is a Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from plimsoll.records import Trajectory
from plimsoll.rollout.protocol import Request

R = TypeVar("R")


class Cluster(Protocol):
    """The training ranks and the engines that sample.

    Every call waits for its result. A rank or engine that dies meanwhile ends the call with
    WorkerDied, which names it.
    """

    ranks: int
    engines: int

    def each(self, task: Callable[..., R], arguments: Sequence[tuple[object, ...]]) -> list[R]:
        """Call a method of `Worker` on every rank, each with its own arguments."""
        ...

    def all(self, task: Callable[..., R], *arguments: object) -> list[R]:
        """Call a method of `Worker` on every rank with the same arguments."""
        ...

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Trajectory]]]:
        """Spread the requests over the engines; yields each one's place among the requests and
        its trajectories as it ends."""
        ...

    def engines_do(self, task: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call a method of `RolloutEngine` on every engine."""
        ...

    def hand_over(
        self,
        gather: Callable[..., R | None],
        arguments: tuple[object, ...],
        receive: Callable[..., Any],
    ) -> None:
        """Call `gather` of Worker on every rank; rank 0's result goes to `receive` of every engine,
        without passing through this process where that can be avoided."""
        ...

    def responses_per_request(self) -> int:
        """How many responses an engine wants to be asked for at once."""
        ...

    def close(self) -> None:
        """End all ranks and engines; leaves no process behind."""
        ...
