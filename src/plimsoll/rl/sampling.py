"""Sample a step's groups of scored responses, and replace groups that failed or teach nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rl import RlConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.config.run import DynamicSampling
from plimsoll.records import Ints, Prompt, Trajectory
from plimsoll.resolve.choices import advantage_needs
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.reward.score import OnFailure, Scorer
from plimsoll.rl.answers import Answering, Answers, FailedGroups, answers
from plimsoll.rl.reward_model import score_by_models
from plimsoll.run.numbers import mean

Draw = Callable[[int, int], Sequence[Prompt]]
"""A function of (first, count) that returns `count` of the step's prompts, from number `first`."""

_PROBE_TOKENS = 64
"""Of each sequence of the probe: a sync costs as much with long prompts as with short ones."""


@dataclass(frozen=True)
class Sampled:
    """The scored groups of a step, before reward models score them.

    Attributes:
        trajectories: the trajectories, group by group.
        greedy: the greedy response to each group's prompt; empty if the advantage needs none.
        prompts: the number of prompts that were drawn from the data.
        metrics: metrics of the sampling, by name.
        unlearned: see `RunState`.
    """

    trajectories: list[Trajectory]
    greedy: list[Trajectory]
    prompts: int
    metrics: Mapping[str, float]
    unlearned: tuple[int, ...] = ()


@dataclass(frozen=True)
class Taken:
    """The groups that a step learns from, and what was looked at for them.

    Attributes:
        groups: the trajectories of each group, by the groups' numbers.
        drawn: the number of groups that were asked for.
        idle: the number of groups that teach nothing.
    """

    groups: list[Sequence[Trajectory]]
    drawn: int
    idle: int


def normalize_rewards(sampled: Sampled, scorer: Scorer) -> Sampled:
    """Return the groups with normalised rewards: (value - mean) / standard deviation.

    Only the rewards that the config says are normalised. Mean and standard deviation are those of
    the run so far, including these trajectories.
    """
    scorer.observe(sampled.trajectories)
    return replace(
        sampled,
        trajectories=scorer.normalize(sampled.trajectories),
        greedy=scorer.normalize(sampled.greedy),
    )


def sample(
    cluster: Cluster, spec: RunSpec[RlConfig], draw: Draw, step: int, answering: Answering
) -> Sampled:
    """Return the scored groups of responses that a step learns from.

    Groups whose reward or environment failed are replaced: further prompts are drawn, in order.

    Metrics: `groups/drawn`, the number of groups sampled; `groups/idle`, the share of them that
    teach nothing; `groups/failed`, the number of groups that were replaced because of a failure.

    Raises PlimsollError as soon as more groups failed than `batch.max_failed_groups`.
    """
    sampling, failed = spec.config.rollout.sampling, FailedGroups(answering.note, spec.config.batch)

    def ask(
        prompts: Sequence[Prompt],
        responses: int,
        sampling: SamplingConfig,
        first: int,
        on_failure: OnFailure,
    ) -> Answers:
        arguments = (prompts, responses, sampling, _seed(spec, step, first), answering, on_failure)
        return answers(cluster, *arguments, first_group=first)

    def take(first: int, count: int) -> list[list[Trajectory]]:
        prompts, responses = draw(first, count), spec.config.batch.responses
        return ask(prompts, responses, sampling, first, failed).whole_groups()

    taken = collect(spec, cluster, take)
    greedy: list[Trajectory] = []
    if "greedy_S" in advantage_needs(spec.config.algorithm.advantage):
        coldest = sampling.model_copy(update={"temperature": 0.0})
        prompts = [group[0].prompt for group in taken.groups]
        replies = ask(prompts, 1, coldest, 0, FailedGroups(answering.note)).trajectories
        pairs = zip(replies, taken.groups, strict=True)
        greedy = [replace(t, group=group[0].group) for t, group in pairs]
    metrics = {"groups/drawn": taken.drawn, "groups/idle": taken.idle / taken.drawn}
    trajectories = [t for group in taken.groups for t in group]
    return Sampled(trajectories, greedy, taken.drawn, metrics | {"groups/failed": len(failed)})


def collect(
    spec: RunSpec[RlConfig],
    cluster: Cluster,
    take: Callable[[int, int], Sequence[Sequence[Trajectory]]],
    set_aside: Callable[[int], object] = lambda idle: None,
) -> Taken:
    """Take groups until a step has those that it learns from.

    With dynamic sampling, groups that teach nothing (see `teaches`) are replaced, until the step
    has drawn the most prompts allowed; groups that teach nothing then fill the step up. Reward
    models score each round there; else they score when engines sleep.

    Args:
        spec: the run.
        cluster: has the reward models.
        take: a function of (first, count) that returns `count` groups, or fewer if some failed,
            after `first` that were asked for before.
        set_aside: told how many of the groups of a round teach nothing.
    """
    batch, dynamic = spec.config.batch, spec.config.batch.dynamic_sampling
    kept: list[Sequence[Trajectory]] = []
    idle: list[Sequence[Trajectory]] = []
    drawn = 0
    while count := next_count(batch.prompts, len(kept), len(idle), drawn, dynamic):
        groups = take(drawn, count)
        drawn += count
        if dynamic is None:
            kept += groups
            continue
        scored = iter(score_by_models([t for group in groups for t in group], spec, cluster))
        groups = [[*islice(scored, len(group))] for group in groups]
        teaching = [group for group in groups if teaches(group, dynamic)]
        kept += teaching
        idle += [group for group in groups if not teaches(group, dynamic)]
        set_aside(len(groups) - len(teaching))
    first = [*kept, *idle][: batch.prompts]
    return Taken(sorted(first, key=lambda group: group[0].group), drawn, len(idle))


def next_count(
    needed: int, kept: int, idle: int, drawn: int, dynamic: DynamicSampling | None
) -> int:
    """Return how many groups to sample next, for a step that needs `needed` groups; 0: no more.

    Args:
        needed: the groups that the step learns from.
        kept: the groups so far that teach something.
        idle: the groups so far that teach nothing.
        drawn: the groups so far, with those that failed.
        dynamic: how groups that teach nothing are replaced; None: they count as kept.
    """
    if dynamic is None:
        return needed - kept
    more = math.ceil((needed - kept) * dynamic.oversampling)
    return max(0, min(more, int(needed * dynamic.max_drawn) - drawn), needed - kept - idle)


def teaches(group: Sequence[Trajectory], dynamic: DynamicSampling) -> bool:
    """Return whether a group's rewards differ and their mean lies strictly between the bounds.

    The reward is the part `dynamic.by`, or without it the weighted sum of all parts.
    """
    rewards = [t.reward if dynamic.by is None else t.part(dynamic.by) for t in group]
    low = -math.inf if dynamic.low is None else dynamic.low
    high = math.inf if dynamic.high is None else dynamic.high
    return min(rewards) < max(rewards) and low < mean(rewards) < high


def _seed(spec: RunSpec[RlConfig], step: int, drawn: int) -> int:
    parts = [spec.run.seed, step, drawn] if drawn else [spec.run.seed, step]
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def probe_sequences(prompts: Sequence[Prompt], spec: RunSpec[RlConfig]) -> list[Ints]:
    """Return the token sequences by which each weight sync is checked.

    They are the beginnings of the first prompts of the data with at least two tokens, because a
    sequence's first token has no log-prob. If all prompts have one token, two of them are joined.
    """
    long_enough = (prompt.tokens for prompt in prompts if len(prompt.tokens) > 1)
    probe = [*islice(long_enough, spec.config.rollout.sync.probe_sequences)]
    probe = probe or [np.concatenate([prompts[0].tokens, prompts[-1].tokens])]
    return [tokens[:_PROBE_TOKENS].astype(np.int64) for tokens in probe]
