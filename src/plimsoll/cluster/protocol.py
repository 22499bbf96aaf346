"""The interface of clusters: a run calls ranks and engines the same way with Ray or without.

Each group of ranks counts its shortages of memory in training, from which smaller micro-batches
follow.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from plimsoll.data.packing import split_packs
from plimsoll.machine.incident import OutOfMemory
from plimsoll.process.threads import conversing
from plimsoll.records import Pack, Trajectory
from plimsoll.resolve.roles import Role, RoleName
from plimsoll.reward.outcome import RewardHosts
from plimsoll.run.readings import Reading
from plimsoll.sampler.protocol import Request

R = TypeVar("R")


class SentOnce(list[R]):
    """A list that a stream gets in several calls, such as its packs, and that crosses once.

    Attributes:
        reference: Where the ranks find the list; it stays there as long as this object lives.
    """

    reference: Any = None


@dataclass(frozen=True)
class Pending(Generic[R]):
    """The answers to a call of a group, which goes on meanwhile.

    Attributes:
        wait: Waits for the call, and returns the answers of all ranks.
        shards: How many ranks work on a stream together.
    """

    wait: Callable[[], list[R]]
    shards: int = 1

    def result(self) -> list[R]:
        """Wait for the call and return the answer of each stream, in their order.

        A rank or engine that dies meanwhile ends the wait with WorkerDied, which names it.
        """
        return self.wait()[:: self.shards]

    def by_stream(self) -> list[list[R]]:
        """Wait as `result` does, and return for each stream the answers of all its ranks."""
        answers = self.wait()
        starts = range(0, len(answers), self.shards)
        return [answers[start : start + self.shards] for start in starts]


@dataclass(frozen=True)
class Halving:
    """A smaller limit for a role, after a rank ran out of memory in an optimizer step.

    Attributes:
        role: The role that was trained.
        error: The error, as the cluster saw it.
        before: The tokens of the micro-batch at which memory ran out.
        after: The most tokens of the role's micro-batches from now on.
    """

    role: RoleName
    error: OutOfMemory
    before: int
    after: int


@dataclass
class Shortages:
    """The shortages of memory of a group of ranks, and the limits that follow from them.

    Attributes:
        most: How often the limit of a role may be halved; see `cluster.memory_halvings`.
        limits: The most tokens of a micro-batch of each role that has run out of memory.
    """

    most: int = 0
    limits: dict[RoleName, int] = field(default_factory=dict)
    _halvings: Counter[RoleName] = field(default_factory=Counter)
    _unreported: list[Halving] = field(default_factory=list)

    def split(
        self, role: RoleName, packs: Sequence[Sequence[Pack]], unit: int
    ) -> Sequence[Sequence[Pack]]:
        """Return the packs within the role's limit; see `split_packs`."""
        limit = self.limits.get(role)
        if limit is None or all(p.tokens <= limit for rank_packs in packs for p in rank_packs):
            return packs
        return split_packs(packs, limit, unit)

    def add(self, role: RoleName, error: OutOfMemory, pack: Pack, unit: int) -> None:
        """Halve the role's limit after memory ran out at a pack.

        Raises `error` if the pack has a single row, or the limit has been halved too often.
        """
        if len(pack.samples_S) <= unit or self._halvings[role] == self.most:
            raise error
        self._halvings[role] += 1
        self.limits[role] = max(1, pack.tokens // 2)
        self._unreported.append(Halving(role, error, pack.tokens, self.limits[role]))

    def take_unreported(self) -> list[Halving]:
        """Return the halvings since the last call."""
        taken, self._unreported = self._unreported, []
        return taken


class Group(Protocol):
    """Training ranks that hold roles together.

    A stream is one data-parallel share of the group's work. `shards` ranks work on a stream
    together; all of them get its arguments, and the first one's answer is the stream's.
    """

    @property
    def shortages(self) -> Shortages:
        """Where memory has run out so far, and the limits that follow."""

    @property
    def streams(self) -> int:
        """The number of data-parallel shares."""

    def call(self, task: Callable[..., R], per_stream: Iterable[tuple[object, ...]]) -> Pending[R]:
        """Begin a method of `Worker` on every rank, with the arguments of the rank's stream.

        The arguments of a stream are taken when those before have been sent.
        """

    def all(self, task: Callable[..., R], *arguments: object) -> list[R]:
        """Call a method of `Worker` on every rank with the same arguments.

        Returns the answers of all ranks, in their order.
        """

    def memory_error(self, stream: int, shard: int, error: OutOfMemory) -> OutOfMemory:
        """Return an error that a rank has returned, with what the cluster sees of the rank."""


class Cluster(Group, Protocol):
    """The training ranks and the engines that sample.

    The ranks host the actor and all other roles, except those of kinds with their own ranks.
    """

    engines: int

    @property
    def engines_near(self) -> bool:
        """Whether every engine is on the node of rank 0."""

    @property
    def own_groups(self) -> Mapping[str, Group]:
        """The groups that host roles of one kind alone, by the kind."""

    async def ask(self, request: Request, episode: int) -> list[Trajectory]:
        """Send a request to an engine and return its trajectories; the method is an `Ask`.

        Coroutines in an event loop of another thread call it, at any time. If an engine dies or a
        request fails, the call that this object is at raises, or the next one, and the coroutine
        waits for ever. Engines in this process answer only during `wait_for`.
        """

    def wait_for(self, future: Future[R]) -> R:
        """Return the result of work in another thread, which may ask engines.

        If coroutines gave up requests, wait until engines have answered those, too.
        """

    def busy_seconds(self) -> list[float]:
        """Return for each engine the seconds so far in which it had requests."""

    def engines_do(self, task: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call a method of `RolloutEngine` on every engine; return the results in their order."""

    def first(self, task: Callable[..., R], *arguments: object) -> R:
        """Call a method of `Worker` on the actor's first rank; it must not wait for others."""

    def all_beside(self, task: Callable[..., R], *arguments: object) -> list[R]:
        """Call a method of `Worker` on every rank, also while another call of the rank goes on.

        The method runs in another thread than the other call. Return the results.
        """

    def let_engines_die(self) -> None:
        """From now on raise the death of an engine only in calls that need engines."""

    def revive_engines(self) -> list[str]:
        """Start engines that have died again; return the names of the dead.

        They have the weights of the model's files until the next sync.
        """

    def hand_over(
        self, gather: Callable[..., Any], given: tuple[object, ...], receive: Callable[..., R]
    ) -> R:
        """Call `gather` of every rank, and pass the first one's result to `receive` of all engines.

        The result passes through this process only if that cannot be avoided. Return the first
        engine's answer.
        """

    def stream(
        self,
        send: Callable[..., Any],
        each: Sequence[tuple[object, ...]],
        receive: Callable[..., Any],
    ) -> None:
        """Call `send` of every rank with one set of arguments after the other.

        Meanwhile call `receive` of every engine as often; each call takes what a rank has sent, by
        a way of their own. Return when all calls have ended.
        """

    def reward_hosts(self) -> AbstractContextManager[RewardHosts | None]:
        """Hold processes on all nodes that compute rewards; None if there is only this node."""

    def responses_per_request(self) -> int:
        """Return how many responses engines want in one request, if prompts suffice."""

    def read_memory(self) -> dict[str, Reading]:
        """Return the memory of every process of the run, with its peaks since the last call.

        The keys are the plan's names of the processes, such as `rank 0`; this process comes first.
        """

    def close(self) -> None:
        """End all ranks and engines, and leave no process behind."""


def converse(cluster: Cluster, loop: AbstractEventLoop, talk: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine in the event loop of another thread, where it may `ask`; return its result.

    An error ends the coroutine first.
    """
    with conversing(loop, talk) as talking:
        return cluster.wait_for(talking)


def on_all_ranks(cluster: Cluster, task: Callable[..., object], *arguments: object) -> None:
    """Call a method of `Worker` on all ranks, one group after the other."""
    for group in (cluster, *cluster.own_groups.values()):
        group.all(task, *arguments)


def group_of(cluster: Cluster, role: Role) -> Group:
    """Return the group that hosts a role."""
    return cluster.own_groups.get(role.group, cluster)
