"""Where roles live, behind one interface: a run does not know whether there is a Ray."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from plimsoll.records import Trajectory
from plimsoll.rollout.protocol import Ask, Request
from plimsoll.run.readings import Reading
from plimsoll.spec.roles import RoleName

R = TypeVar("R")


class Ranks(Protocol):
    """A group of training ranks.

    Every call waits for its result. A rank or engine that dies meanwhile ends the call with
    WorkerDied, which names it.
    """

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        ...

    def each(self, task: Callable[..., R], arguments: Sequence[tuple[object, ...]]) -> list[R]:
        """Call a method of `Worker` on every rank, each with its own arguments."""
        ...

    def all(self, task: Callable[..., R], *arguments: object) -> list[R]:
        """Call a method of `Worker` on every rank with the same arguments."""
        ...


class Cluster(Ranks, Protocol):
    """The training ranks and the engines that sample.

    The ranks are those of the actor, and with it of all roles but a critic that has ranks of its
    own.
    """

    engines: int

    @property
    def critics(self) -> Ranks:
        """The critic's ranks: this very object, or a group of its own."""
        ...

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Trajectory]]]:
        """Spread the requests over the engines; yield each one's place and trajectories as it ends.

        The place is that among the requests.
        """
        ...

    def converse(self, loop: AbstractEventLoop, talk: Callable[[Ask], Coroutine[Any, Any, R]]) -> R:
        """Run a coroutine in an event loop of another thread, and return its result.

        The coroutine asks the engines as often as it likes, in its own time. An engine that dies or
        fails meanwhile ends the call as it ends others. An error that ends the call ends the
        coroutine first.
        """
        ...

    def engines_do(self, task: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call a method of `RolloutEngine` on every engine."""
        ...

    def hand_over(
        self,
        gather: Callable[..., Any],
        arguments: Sequence[tuple[object, ...]],
        receive: Callable[..., R],
    ) -> list[R]:
        """Pass results of `gather` on the ranks to `receive` of every engine, one after the other.

        `gather` of Worker is called on every rank, with one set of arguments after the other. Rank
        0's result goes to every engine, without passing through this process where that can be
        avoided, while the ranks gather the next. At most two results are alive.

        Returns:
            What the first engine made of each result.
        """
        ...

    def responses_per_request(self) -> int:
        """Return how many responses an engine wants to be asked for at once."""
        ...

    def read_memory(self) -> dict[str, Reading]:
        """Return what every process of the run holds, and its peaks since the last call.

        The keys are the plan's names of the processes, such as `rank 0`; this process comes first.
        """
        ...

    def close(self) -> None:
        """End all ranks and engines, and leave no process behind."""
        ...


def on_all_ranks(cluster: Cluster, task: Callable[..., object]) -> None:
    """Call a method of `Worker` on the ranks of all roles."""
    cluster.all(task)
    if cluster.critics is not cluster:
        cluster.critics.all(task)


def ranks_of(cluster: Cluster, role: RoleName) -> Ranks:
    """Return the group of ranks that hosts a role."""
    return cluster.critics if role == "critic" else cluster
