"""Sample a step's groups of scored responses, and replace groups that failed or teach nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
    """

    trajectories: list[Trajectory]
    greedy: list[Trajectory]
    prompts: int
    metrics: Mapping[str, float]


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
    With dynamic sampling, groups that teach nothing (see `teaches`) are replaced too, until the
    step has drawn the most prompts allowed; groups that teach nothing then fill the step up.

    Metrics: `groups/drawn`, the number of groups sampled; `groups/idle`, the share of them that
    teach nothing; `groups/failed`, the number of groups that were replaced because of a failure.

    Raises PlimsollError as soon as more groups failed than `batch.max_failed_groups`.
    """
    batch, dynamic = spec.config.batch, spec.config.batch.dynamic_sampling
    sampling = spec.config.rollout.sampling

    def ask(
        prompts: Sequence[Prompt],
        responses: int,
        sampling: SamplingConfig,
        first: int,
        on_failure: OnFailure,
    ) -> Answers:
        arguments = (prompts, responses, sampling, _seed(spec, step, first), answering, on_failure)
        return answers(cluster, *arguments, first_group=first)

    kept: list[list[Trajectory]] = []
    idle: list[list[Trajectory]] = []
    failed = FailedGroups(answering.note, batch)
    drawn = 0
    while count := next_count(batch.prompts, len(kept), len(idle), drawn, dynamic):
        scored = ask(draw(drawn, count), batch.responses, sampling, drawn, failed)
        if dynamic is not None:  # else all are scored once engines sleep
            trajectories = score_by_models(scored.trajectories, spec, cluster)
            scored = replace(scored, trajectories=trajectories)
        for group in scored.whole_groups():
            (kept if dynamic is None or teaches(group, dynamic) else idle).append(group)
        drawn += count
    groups = sorted([*kept, *idle][: batch.prompts], key=lambda group: group[0].group)
    greedy: list[Trajectory] = []
    if "greedy_S" in advantage_needs(spec.config.algorithm.advantage):
        coldest = sampling.model_copy(update={"temperature": 0.0})
        prompts = [group[0].prompt for group in groups]
        replies = ask(prompts, 1, coldest, 0, FailedGroups(answering.note)).trajectories
        greedy = [replace(t, group=g[0].group) for t, g in zip(replies, groups, strict=True)]
    metrics = {"groups/drawn": drawn, "groups/idle": len(idle) / drawn}
    trajectories = [t for group in groups for t in group]
    return Sampled(trajectories, greedy, drawn, metrics | {"groups/failed": len(failed)})


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
    long_enough = [p.tokens for p in prompts if len(p.tokens) > 1]
    pair = np.concatenate([prompts[0].tokens, prompts[-1].tokens])
    probe = (long_enough or [pair])[: spec.config.rollout.sync.probe_sequences]
    return [tokens[:_PROBE_TOKENS].astype(np.int64) for tokens in probe]
