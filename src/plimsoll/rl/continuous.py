"""Sample without a pause: engines answer further prompts while the ranks train.

A step learns from groups whose tokens are at most `rollout.staleness` versions old. In all else it
is the step of a run that takes turns (live.py), which also evaluates and syncs.
"""

from __future__ import annotations

import time
from asyncio import run_coroutine_threadsafe
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from plimsoll.cluster.protocol import Cluster
from plimsoll.records import Prompt, Trajectory
from plimsoll.reward.score import OnFailure, RewardFailure, Scored, Scorer
from plimsoll.rl.answers import FailedGroups, answer_group
from plimsoll.rl.buffer import FinishedGroup, GroupBuffer, staleness_metrics
from plimsoll.rl.environments import EnvironmentKinds
from plimsoll.rl.episodes import Floor, play_group
from plimsoll.rl.experience import Experience, Source
from plimsoll.rl.group_journal import GroupJournal
from plimsoll.rl.live import Live
from plimsoll.rl.reward_model import score_by_models
from plimsoll.rl.sampling import Sampled, next_count, normalize_rewards, teaches
from plimsoll.rl.setup import RlWork
from plimsoll.rl.stream import GroupStream
from plimsoll.run.state import RunState
from plimsoll.sampler.protocol import Ask, RolloutEngine

R = TypeVar("R")


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


class Continuous(Source):
    """A `Source` whose engines sample while the ranks train; see `GroupStream`.

    They begin with the first step that asks for trajectories.
    """

    def __init__(self, live: Live) -> None:
        self._live, self._work, self._cluster = live, live.work, live.work.cluster
        self._answer = prompt_sampler(live, self._cluster.keep_asking(), self._note_failure)
        self._failed = self._no_failures()
        self._times = BusyTimes.now(self._cluster)
        self._stream: GroupStream | None = None

    @classmethod
    def start(cls, work: RlWork, scorer: Scorer, kinds: EnvironmentKinds) -> Continuous:
        """Return the source, after checking that engines and ranks hold the same weights."""
        return cls(Live.start(work, scorer, kinds))

    def begin(self, state: RunState) -> None:
        """Send a resumed run's weights to the engines."""
        self._live.begin(state)

    def _begin_to_sample(self, state: RunState) -> GroupStream:
        config = self._work.config
        buffer = GroupBuffer(
            config.batch.prompts,
            config.rollout.staleness,
            groups_at_once(self._live),
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

    def draw(self, state: RunState) -> Experience:
        """Return the groups of the step after `state`, as soon as enough have ended."""
        with self._work.session.phase("rollout", self._cluster):
            stream = self._stream = self._stream or self._begin_to_sample(state)
            started = time.monotonic()
            groups, idle = self._take_groups(stream)
            now = BusyTimes.now(self._cluster)
            metrics = now.idle_since(self._times, waited=now.seconds - started)
            before, after = self._do(stream.advance())
            drawn = after.settled - state.data_position
            metrics |= {
                "groups/drawn": drawn,
                "groups/idle": idle / drawn,
                "groups/failed": len(self._failed),
                "groups/dropped": before.dropped,
            }
            self._failed, self._times = self._no_failures(), now
            trajectories = [t for group in groups for t in group]
            metrics |= staleness_metrics(trajectories, state.weight_version)
            sampled = Sampled(trajectories, [], drawn, metrics)
            trajectories = normalize_rewards(sampled, self._live.scorer).trajectories
        if self._work.config.batch.dynamic_sampling is None:  # else they have been scored
            with self._work.session.phase("score", self._cluster):
                trajectories = self._score(trajectories)
        return Experience(trajectories, {}, drawn, metrics, after.unlearned)

    def _take_groups(self, stream: GroupStream) -> tuple[list[Sequence[Trajectory]], int]:
        """Return the groups of a step, and how many of those that were looked at teach nothing."""
        batch, dynamic = self._work.config.batch, self._work.config.batch.dynamic_sampling
        kept: list[Sequence[Trajectory]] = []
        idle: list[Sequence[Trajectory]] = []
        while count := next_count(
            batch.prompts, len(kept), len(idle), len(kept) + len(idle), dynamic
        ):
            groups = [group.trajectories for group in self._do(stream.take(count))]
            if dynamic is None:
                kept += groups
                continue
            scored = self._score([t for group in groups for t in group])
            size = batch.responses
            groups = [scored[i : i + size] for i in range(0, len(scored), size)]
            teaching = [group for group in groups if teaches(group, dynamic)]
            kept += teaching
            idle += [group for group in groups if not teaches(group, dynamic)]
            self._do(stream.set_aside(len(groups) - len(teaching)))
        return sorted([*kept, *idle][: batch.prompts], key=lambda group: group[0].group), len(idle)

    def _score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with the scores of the run's reward models."""
        return score_by_models(trajectories, self._work.spec, self._cluster)

    def revive(self, version: int) -> list[str]:
        """Start dead engines again; groups that have not ended are sampled anew."""
        self.close()
        self._stream = None
        return self._live.revive(version)

    def renew(self, step: int) -> dict[str, float]:
        """Send the ranks' weights to the paused engines, and let further groups begin."""
        metrics = self._live.renew(step)
        if self._stream is not None:
            self._do(self._stream.renew(step))
        return metrics

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the figures of the held-out prompts, which engines answer beside their groups."""
        return self._live.evaluate(step)

    def rewards(self) -> dict[str, dict[str, float]]:
        """Return the running statistics of rewards."""
        return self._live.rewards()

    def close(self) -> None:
        """Cancel the groups in flight."""
        if self._stream is not None:
            run_coroutine_threadsafe(self._stream.end(), self._live.scorer.loop).result()

    def _do(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return self._cluster.wait_for(run_coroutine_threadsafe(coroutine, self._live.scorer.loop))

    async def _sample(self, place: int, version: int) -> Scored:
        [prompt] = self._work.batch(place, 1)
        journal = GroupJournal(self._work.session.journal, ("group", place))
        found = journal.find([prompt] * self._work.config.batch.responses)
        if found is not None and self._is_fresh(found, version):
            return found
        seeds = np.random.SeedSequence([self._work.config.run.seed, place, version])
        seed = int(seeds.generate_state(1)[0])
        scored = await self._answer(prompt, seed, place, journal.within(version))
        journal.keep(scored)
        return scored

    def _is_fresh(self, found: Scored, version: int) -> bool:
        """Return whether a group from before a crash would not be dropped at once."""
        age = version - FinishedGroup(0, found.trajectories).oldest
        return 0 <= age <= self._work.config.rollout.staleness

    def _no_failures(self) -> FailedGroups:
        return FailedGroups(self._work.session.progress.note, self._work.config.batch)

    def _note_failure(self, failure: RewardFailure) -> None:
        self._failed(failure)


SamplePrompt = Callable[[Prompt, int, int, GroupJournal], Awaitable[Scored]]
"""Samples and scores the group of a prompt. Args: the prompt, a seed, the group's number, and the
journal of its episodes."""


def prompt_sampler(live: Live, ask: Ask, on_failure: OnFailure) -> SamplePrompt:
    """Return the function that samples a run's groups, by turns of episodes or at once."""
    config, environments = live.work.config, live.environments
    sampling, responses = config.rollout.sampling, config.batch.responses
    submit = live.scorer.submit  # not counted by phases: groups end in all of them
    if environments is not None:
        shared = sampling, responses, submit, on_failure, live.scorer.source
        floor = Floor(environments, ask, *shared)

        def play(prompt: Prompt, seed: int, group: int, journal: GroupJournal) -> Awaitable[Scored]:
            return play_group(floor, prompt, seed, group, group * responses, journal)

        return play

    def answer(prompt: Prompt, seed: int, group: int, _: GroupJournal) -> Awaitable[Scored]:
        settings = responses, sampling, seed, submit, on_failure
        return answer_group(ask, prompt, *settings, group)

    return answer


def groups_at_once(live: Live) -> int:
    """Return the most groups in flight: one more for each engine than it can work on."""
    config, environments = live.work.config, live.environments
    rollout, responses = config.rollout, config.batch.responses
    if environments is not None:
        return rollout.engines + environments.at_once // responses
    return rollout.engines * (1 + rollout.max_sequences // responses)
