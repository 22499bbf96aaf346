"""Sample ahead of the step that learns: engines answer further prompts while the ranks train.

A group is known by its place: the number of its prompt in the order of the data. Weights are known
by their version, which is the number of the step that made them.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import run_coroutine_threadsafe
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from plimsoll.cluster.protocol import Cluster
from plimsoll.errors import PlimsollError
from plimsoll.records import Trajectory
from plimsoll.reward.score import RewardFailure, Scored, Scorer
from plimsoll.rl.answers import FailedGroups, answer
from plimsoll.rl.episodes import Asking, Environments, Floor, play_group
from plimsoll.rl.group_journal import GroupJournal
from plimsoll.rl.sampling import Sampled, collect
from plimsoll.rl.setup import RlWork
from plimsoll.run.state import RunState
from plimsoll.sampler.protocol import RolloutEngine

R = TypeVar("R")


@dataclass(frozen=True)
class FinishedGroup:
    """A group whose trajectories are complete and scored.

    Attributes:
        place: the place of its prompt.
        trajectories: the trajectories, in the order of their numbers.
    """

    place: int
    trajectories: Sequence[Trajectory]

    @cached_property
    def oldest(self) -> int:
        """The oldest version of weights that sampled a token of the group."""
        branches = [branch for t in self.trajectories for branch in t.branches]
        versions = [branch.weight_versions[branch.loss_mask] for branch in branches]
        return min(int(of_branch.min()) for of_branch in versions if len(of_branch))


@dataclass(frozen=True)
class GroupBuffer:
    """The groups of a run that samples while it learns; every method returns the next buffer.

    At most `staleness` + 1 batches are in flight or wait when new weights come, and no more begin
    than keep the ranks busy (`ahead`): what waits for its turn only grows old. A step takes the
    oldest groups first. So only a group that is overtaken can be dropped, one in whose flight a
    step learned from younger ones: of the groups that are as old or older, no more are left than
    the steps take for which it is young enough.

    Attributes:
        prompts: the groups that a step learns from.
        staleness: by how many versions a token may be older than the weights that learn from it.
        at_once: the most groups in flight.
        steps: the number of the run's last step; nothing is sampled for later ones.
        learns: the version of the weights that learn next.
        next_place: the place of the next new prompt.
        again: places of prompts that were drawn and are to be sampled again, before new ones.
        in_flight: places of the groups that are being sampled.
        finished: the groups that wait, in the order in which they ended.
        taken: the number of groups that the next step has taken so far.
        dropped: the number of groups that were too old for the next step.
        ahead: how many batches are sampled ahead of the one that learns, from 1 to `staleness`.
    """

    prompts: int
    staleness: int
    at_once: int
    steps: int
    learns: int
    next_place: int
    again: tuple[int, ...] = ()
    in_flight: frozenset[int] = frozenset()
    finished: tuple[FinishedGroup, ...] = ()
    taken: int = 0
    dropped: int = 0
    ahead: int = 1

    def room(self, version: int) -> int:
        """Return how many groups may begin while the engines have weights of `version`."""
        steps = min(self.ahead + 1 + version, self.steps) - self.learns
        most = steps * self.prompts
        room = most - len(self.in_flight) - len(self.finished) - self.taken
        return max(0, min(room, self.at_once - len(self.in_flight)))

    def begin(self, version: int) -> tuple[GroupBuffer, list[int]]:
        """Fill the room; return the new buffer and the places of the groups to sample."""
        room = self.room(version)
        again, new = self.again[:room], max(0, room - len(self.again))
        places = [*again, *range(self.next_place, self.next_place + new)]
        buffer = replace(
            self,
            again=self.again[room:],
            next_place=self.next_place + new,
            in_flight=self.in_flight.union(places),
        )
        return buffer, places

    def finish(self, group: FinishedGroup) -> GroupBuffer:
        """Let a group wait that was in flight; drop it if it is too old for the next step."""
        buffer = self.give_up(group.place)
        return replace(buffer, finished=(*self.finished, group))._without_old()

    def give_up(self, place: int) -> GroupBuffer:
        """Forget a group in flight, which failed; its prompt is not sampled again."""
        assert place in self.in_flight
        return replace(self, in_flight=self.in_flight - {place})

    def take(self, count: int) -> tuple[GroupBuffer, list[FinishedGroup]] | None:
        """Take groups for the next step, sorted by their places; None if too few have ended.

        They are the oldest ones; of equal age, those that ended first.
        """
        if len(self.finished) < count:
            return None
        taken = sorted(self.finished, key=lambda group: group.oldest)[:count]
        places = {group.place for group in taken}
        rest = tuple(group for group in self.finished if group.place not in places)
        buffer = replace(self, finished=rest, taken=self.taken + count)
        return buffer, sorted(taken, key=lambda group: group.place)

    def set_aside(self, count: int) -> GroupBuffer:
        """Make room for others instead of groups that were taken and teach nothing."""
        return replace(self, taken=self.taken - count)

    def advance(self, waited: bool) -> GroupBuffer:
        """Return the buffer for the step after the one that has taken its groups.

        It samples a batch further ahead if the ranks have waited for groups, and a batch less if
        the groups of the next step wait already.
        """
        ahead = self.ahead + waited - (len(self.finished) >= self.prompts)
        ahead = max(1, min(ahead, self.staleness))
        buffer = replace(self, learns=self.learns + 1, taken=0, dropped=0, ahead=ahead)
        return buffer._without_old()

    def _without_old(self) -> GroupBuffer:
        old = [
            group.place for group in self.finished if self.learns - group.oldest > self.staleness
        ]
        if not old:
            return self
        return replace(
            self,
            finished=tuple(group for group in self.finished if group.place not in old),
            again=tuple(sorted((*self.again, *old))),
            dropped=self.dropped + len(old),
        )

    @property
    def unlearned(self) -> tuple[int, ...]:
        """The places of prompts that were drawn, and that no step has learned from or given up."""
        waiting = (group.place for group in self.finished)
        return tuple(sorted(chain(self.again, self.in_flight, waiting)))

    @property
    def settled(self) -> int:
        """The number of prompts that were learned from or given up."""
        return self.next_place - len(self.unlearned)


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return how many versions old the sampled tokens are for weights of `version`.

    `staleness/continued` is the share of sampled tokens that follow after a sync in a response
    that began before it.
    """
    branches = [branch for t in trajectories for branch in t.branches]
    sampled = [branch.weight_versions[branch.loss_mask] for branch in branches]
    sampled = [versions for versions in sampled if len(versions)]
    ages = version - np.concatenate(sampled)
    continued = np.concatenate([versions > versions[0] for versions in sampled])
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/p90": float(np.quantile(ages, 0.9)),
        "staleness/max": float(ages.max()),
        "staleness/continued": float(continued.mean()),
    }


SampleGroup = Callable[[int, int], Coroutine[Any, Any, Scored]]
"""Samples and scores a group. Args: the place of its prompt, the version of the newest weights."""


class GroupStream:
    """Keeps as many groups in flight as the buffer allows.

    Consumes: places of prompts, and versions of new weights (`renew`). Waits for: the groups in
    flight, that is for engines, environments and rewards. Unblocked by: a group that ends, a step
    that has its groups (`advance`), and new weights. Produces: the groups of each step; the first
    error of a group is raised by `take`. Shut down by `end`, which cancels all groups.

    All methods are coroutines of one event loop, so that nothing changes the buffer meanwhile.
    """

    def __init__(self, buffer: GroupBuffer, sample: SampleGroup) -> None:
        self._buffer, self._sample = buffer, sample
        self._version = buffer.learns
        self._tasks: set[asyncio.Task[Scored]] = set()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._waited = False

    async def renew(self, version: int) -> None:
        """Begin the groups for which there is room now that engines have weights of `version`."""
        self._version = version
        self._begin()

    async def take(self, count: int) -> list[FinishedGroup]:
        """Take groups for the next step, as soon as so many have ended."""
        while True:
            if self._error is not None:
                raise self._error
            if (taken := self._buffer.take(count)) is not None:
                self._buffer, groups = taken
                return groups
            self._waited = True
            self._changed.clear()
            await self._changed.wait()

    async def set_aside(self, count: int) -> None:
        """Begin others instead of groups that were taken and teach nothing."""
        self._buffer = self._buffer.set_aside(count)
        self._begin()

    async def advance(self) -> tuple[GroupBuffer, GroupBuffer]:
        """Go on to the step after the one that has taken its groups, and begin others.

        Returns:
            The buffer of the step that has its groups, and of the next before others begin.
        """
        before, after = self._buffer, self._buffer.advance(self._waited)
        self._buffer, self._waited = after, False
        self._begin()
        return before, after

    async def end(self) -> None:
        """Cancel all groups in flight, and wait for their end."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        self._buffer, places = self._buffer.begin(self._version)
        for place in places:
            task = asyncio.get_running_loop().create_task(self._sample(place, self._version))
            self._tasks.add(task)
            task.add_done_callback(partial(self._finish, place))

    def _finish(self, place: int, task: asyncio.Task[Scored]) -> None:
        if task not in self._tasks:  # `end` has cancelled it
            return
        self._tasks.remove(task)
        if task.cancelled():
            self._error = self._error or PlimsollError(f"group {place} was cancelled")
        elif (error := task.exception()) is not None:
            self._error = self._error or error
        elif task.result().failures:
            self._buffer = self._buffer.give_up(place)
        else:
            group = FinishedGroup(place, task.result().trajectories)
            self._buffer = self._buffer.finish(group)
        self._begin()
        self._changed.set()


@dataclass(frozen=True)
class BusyTimes:
    """How long engines have been busy, at a moment of the run.

    Attributes:
        seconds: the moment.
        engines_busy: the seconds so far in which each engine had requests.
    """

    seconds: float
    engines_busy: Sequence[float]

    @classmethod
    def now(cls, cluster: Cluster) -> BusyTimes:
        """Return the times at the moment of the call."""
        return cls(time.monotonic(), cluster.busy_seconds())

    def idle_since(self, before: BusyTimes, waited: float) -> dict[str, float]:
        """Return the shares of the time since another moment in which engines and ranks were idle.

        `waited` is the number of seconds for which the ranks waited for groups.
        """
        seconds = self.seconds - before.seconds
        pairs = zip(self.engines_busy, before.engines_busy, strict=True)
        busy = fmean(now - then for now, then in pairs) / seconds
        return {"idle/engines": max(0.0, 1 - busy), "idle/ranks": waited / seconds}


class SampledAhead:
    """The groups of a run whose engines sample while the ranks train; see `GroupStream`.

    A step learns from groups whose tokens are at most `rollout.staleness` versions old. The engines
    begin with the first step that asks for groups.
    """

    def __init__(self, work: RlWork, scorer: Scorer, environments: Environments | None) -> None:
        self._work, self._cluster = work, work.cluster
        self._scorer, self._environments = scorer, environments
        config = work.config
        # Not counted by phases: groups end in all of them.
        self._asking = Asking(
            self._cluster.ask,
            config.batch.responses,
            config.rollout.sampling,
            scorer.submit,
            self._note_failure,
        )
        self._failed = self._no_failures()
        self._times = BusyTimes.now(self._cluster)
        self._stream: GroupStream | None = None

    def draw(self, state: RunState) -> Sampled:
        """Return the groups of the step after `state`, as soon as enough have ended."""
        stream = self._stream = self._stream or self._begin(state)
        started = time.monotonic()

        def take(first: int, count: int) -> list[Sequence[Trajectory]]:
            return [group.trajectories for group in self._do(stream.take(count))]

        def set_aside(count: int) -> None:
            self._do(stream.set_aside(count))

        taken = collect(self._work.spec, self._cluster, take, set_aside)
        now = BusyTimes.now(self._cluster)
        metrics = now.idle_since(self._times, waited=now.seconds - started)
        before, after = self._do(stream.advance())
        drawn = after.settled - state.data_position
        metrics |= {
            "groups/drawn": drawn,
            "groups/idle": taken.idle / drawn,
            "groups/failed": len(self._failed),
            "groups/dropped": before.dropped,
        }
        self._failed, self._times = self._no_failures(), now
        trajectories = [t for group in taken.groups for t in group]
        metrics |= staleness_metrics(trajectories, state.weight_version)
        return Sampled(trajectories, [], drawn, metrics, after.unlearned)

    def renew(self, version: int) -> None:
        """Let further groups begin, now that engines have weights of `version`."""
        if self._stream is not None:
            self._do(self._stream.renew(version))

    def end(self) -> None:
        """Cancel the groups in flight; the next step samples anew what has not ended."""
        if self._stream is not None:
            run_coroutine_threadsafe(self._stream.end(), self._scorer.loop).result()
            self._stream = None

    def _begin(self, state: RunState) -> GroupStream:
        config = self._work.config
        buffer = GroupBuffer(
            config.batch.prompts,
            config.rollout.staleness,
            self._groups_at_once(),
            self._work.spec.steps,
            learns=state.weight_version,
            next_place=state.next_place,
            again=state.unlearned,
        )
        self._cluster.engines_do(RolloutEngine.resume)  # from now on they label their tokens
        stream = GroupStream(buffer, self._sample)
        self._do(stream.renew(state.weight_version))
        self._times = BusyTimes.now(self._cluster)
        return stream

    def _groups_at_once(self) -> int:
        """Return the most groups in flight: one more for each engine than it can work on."""
        rollout, responses = self._work.config.rollout, self._asking.responses
        if self._environments is not None:
            return rollout.engines + self._environments.at_once // responses
        return rollout.engines * (1 + rollout.max_sequences // responses)

    def _do(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return self._cluster.wait_for(run_coroutine_threadsafe(coroutine, self._scorer.loop))

    async def _sample(self, place: int, version: int) -> Scored:
        """Sample the group at a place, or return it as it was sampled before a crash."""
        [prompt] = self._work.batch(place, 1)
        journal = GroupJournal(self._work.session.journal, ("group", place))
        oldest = max(0, version - self._work.config.rollout.staleness)
        for before in range(version, oldest - 1, -1):
            found = journal.under(before).find([prompt] * self._asking.responses)
            if found is not None and FinishedGroup(place, found.trajectories).oldest >= oldest:
                return found  # else it would be dropped at once
        seeds = np.random.SeedSequence([self._work.config.run.seed, place, version])
        seed, kept = int(seeds.generate_state(1)[0]), journal.under(version)
        if self._environments is None:
            return await answer(self._asking, [prompt], seed, place, kept)
        floor = Floor(self._environments, self._asking, self._scorer.source)
        return await play_group(floor, prompt, seed, place, kept)

    def _no_failures(self) -> FailedGroups:
        return FailedGroups(self._work.session.progress.note, self._work.config.batch)

    def _note_failure(self, failure: RewardFailure) -> None:
        self._failed(failure)
