"""Pack the trajectories of a step, score them, estimate advantages, and report their metrics.

Trajectories are packed once, mini-batch by mini-batch. Scoring and training use the same packs, and
all columns have an entry for each trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch

from plimsoll.algorithm.choice import advantage
from plimsoll.algorithm.inputs import AdvantageInputs
from plimsoll.algorithm.policy_objective import PolicyTerms
from plimsoll.algorithm.ratios import kl
from plimsoll.cluster.protocol import Cluster, group_of
from plimsoll.config.cluster import MAIN_RANKS
from plimsoll.config.rl import KlConfig, RlAlgorithm, RlConfig
from plimsoll.records import (
    ADVANTAGES,
    COLUMNS,
    REFERENCE_LOGPROBS,
    RETURNS,
    SAMPLED,
    SAMPLER_LOGPROBS,
    TEACHER_LOGPROBS,
    TOKEN_REWARDS,
    TRAINER_LOGPROBS,
    VALUES,
    BatchColumns,
    Column,
    Entries,
    Floats,
    Ints,
    Trajectory,
)
from plimsoll.resolve.choices import AdvantageNeed, advantage_needs
from plimsoll.resolve.roles import Role, RoleName
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.rl.layout import (
    MiniBatch,
    divide,
    lay_out,
    learned_columns,
    packed_order,
    score,
)
from plimsoll.run.health import gaming_figures, repeating
from plimsoll.run.numbers import mean
from plimsoll.sampler.protocol import CACHED_TOKENS, PROMPT_TOKENS
from plimsoll.train.session import mean_metrics
from plimsoll.train.update import OptimizerStep, Packs, teach, update
from plimsoll.trainer.protocol import Objective
from plimsoll.trainer.schedule import learning_rate
from plimsoll.trainer.worker import Worker


@dataclass(frozen=True)
class Batch:
    """The trajectories of a step, packed.

    Attributes:
        episodes: the episodes that were sampled.
        trajectories: the branches of each episode, episode after episode; each is a sequence.
        minis: the mini-batches for the actor's ranks; the numbers of the packs' samples are those
            of the trajectories.
        critic_minis: the mini-batches for the critic's ranks; the same object if both are equal.
        seed: (seed of the run, step), from which the order of the mini-batches is drawn.
    """

    episodes: list[Trajectory]
    trajectories: list[Trajectory]
    minis: list[MiniBatch]
    critic_minis: list[MiniBatch]
    seed: tuple[int, int]

    def schedule(self, minis: Sequence[MiniBatch], epochs: int) -> Iterator[tuple[int, MiniBatch]]:
        """Yield (update number from 0, mini-batch) of all epochs; each epoch is shuffled anew."""
        rng = np.random.default_rng([*self.seed, 1])
        order = (i for _ in range(epochs) for i in rng.permutation(len(minis)))
        for number, index in enumerate(order):
            yield number, minis[index]


def token_count(episodes: Sequence[Trajectory]) -> int:
    """Return the number of prompt and response tokens of all branches of the episodes."""
    branches = [branch for episode in episodes for branch in episode.branches]
    return sum(len(t.prompt.tokens) + len(t.response_tokens) for t in branches)


def policy_logprobs(columns: BatchColumns) -> Entries:
    """Return the old policy's log-probs: the trainer's if it scored them, else the sampler's."""
    return columns.get(TRAINER_LOGPROBS, columns[SAMPLER_LOGPROBS])


def pack_batch(
    episodes: list[Trajectory],
    spec: RunSpec[RlConfig],
    ranks: int,
    critic_ranks: int,
    step: int,
) -> Batch:
    """Return the episodes in random mini-batches, each divided into packs for the ranks.

    With `algorithm.mask_truncated` the episodes that were cut off have no learned tokens.
    """
    seed, algorithm = (spec.run.seed, step), spec.config.algorithm
    episodes = masked(episodes, algorithm)
    shuffled = np.random.default_rng([*seed, 0]).permutation(len(episodes))
    trajectories = [branch for episode in episodes for branch in episode.branches]
    ends = np.cumsum([len(episode.branches) for episode in episodes])
    places = np.split(np.arange(len(trajectories)), ends[:-1])
    beside = _prefix_numbers(episodes) if spec.workload.shares_prompts else None

    def lay_out_for(minis: int, ranks: int) -> list[MiniBatch]:
        members = [
            np.concatenate([places[i] for i in episode_numbers])
            for episode_numbers in np.split(shuffled, minis)
        ]
        return lay_out(trajectories, members, ranks, spec.workload.budget, beside=beside)

    minis = lay_out_for(algorithm.mini_batches, ranks)
    critic_minis = algorithm.critic_mini_batches or algorithm.mini_batches
    same = (critic_minis, critic_ranks) == (algorithm.mini_batches, ranks)
    critics = minis if same else lay_out_for(critic_minis, critic_ranks)
    return Batch(episodes, trajectories, minis, critics, seed)


def masked(episodes: list[Trajectory], algorithm: RlAlgorithm) -> list[Trajectory]:
    """Return the episodes; with `mask_truncated` those that were cut off learn no token."""
    if not algorithm.mask_truncated:
        return episodes
    return [_unlearned(e) if e.finish_reason == "length" else e for e in episodes]


def _unlearned(episode: Trajectory) -> Trajectory:
    """Return an episode of which no token is learned."""
    return episode.change_branches(
        lambda t: replace(t, loss_mask=np.broadcast_to(False, t.loss_mask.shape))
    )


def _prefix_numbers(episodes: Sequence[Trajectory]) -> list[int]:
    """Return a number for each branch; branches with the same number begin with the same tokens.

    They are the responses to one prompt. In an episode with several branches, they are its
    branches, which have more tokens in common.
    """
    return [
        -1 - number if episode.earlier else episode.group
        for number, episode in enumerate(episodes)
        for _ in episode.branches
    ]


def score_batch(batch: Batch, spec: RunSpec[RlConfig], cluster: Cluster) -> dict[Column, Entries]:
    """Return the sampled columns that losses need, and those that the run's roles compute."""
    columns = learned_columns(batch.trajectories, [c for c in SAMPLED if c.in_policy_loss])
    for name, role in spec.roles.items():
        if role.head == "states":
            [mini] = batch.minis
            teach(name, cluster.shortages.split(spec.sender.name, mini.packs, unit=1), cluster)
        elif role.column and (spec.scores_before_learning or not role.sends):
            task = Worker.values if role.head == "value" else Worker.log_probs
            minis = batch.minis if role.group == MAIN_RANKS else batch.critic_minis
            columns[COLUMNS[role.column]] = score(minis, group_of(cluster, role), task, name)
    return columns


def rate_of(role: Role, spec: RunSpec[RlConfig], minis: int, step: int, update: int) -> float:
    """Return the learning rate of a role at an update of a step, both counted from 0.

    The schedule begins with the first step that trains the role, so that the learning rate's
    warm-up does not pass before. `minis` is the number of mini-batches of a step.
    """
    updates = spec.config.algorithm.epochs * minis
    done, total = ((steps - role.begins) * updates for steps in (step, spec.steps))
    return learning_rate(spec.trained[role.name].optimizer, done + update, total)


def train_on(
    batch: Batch,
    minis: Sequence[MiniBatch],
    role: Role,
    spec: RunSpec[RlConfig],
    cluster: Cluster,
    step: int,
    objective: Objective,
    columns: BatchColumns | RoleName,
    loss: str,
) -> dict[str, float]:
    """Train a role on all epochs and mini-batches; return the means of the updates' metrics.

    `step`: the steps before this one. `columns`: those of an `OptimizerStep`. `loss`: the metric's
    name for the loss.
    """
    name, group, results = role.name, group_of(cluster, role), []
    for number, mini in batch.schedule(minis, spec.config.algorithm.epochs):
        packs: Packs = mini.packs
        if isinstance(columns, RoleName):
            packs = group.shortages.split(name, packs, unit=1)  # as the teacher read them
        rate = rate_of(role, spec, len(minis), step, number)
        optimizer_step = OptimizerStep(packs, mini.counts, objective, columns)
        results.append(update(name, group, optimizer_step, rate))
    metrics = mean_metrics(results)
    return metrics | {
        loss: metrics.pop("loss"),
        f"{name}/grad_norm": metrics.pop("grad_norm"),
        f"{name}/skipped_steps": metrics.pop("skipped_steps"),
    }


def estimate_advantages(
    batch: Batch,
    scores: BatchColumns,
    algorithm: RlAlgorithm,
    kl_coefficient: float,
    greedy: Mapping[int, float],
) -> dict[Column, Entries]:
    """Return the columns of advantages (and returns), by the configured estimator.

    The estimator gets each episode as one sequence, which joins the episode's branches. With a
    teacher's log-probs, distill_weight * (teacher - policy) of the sampled token is added: the
    policy gradient of the reverse KL at that token, without what follows it (a discount of 0; Lu et
    al. 2025, https://thinkingmachines.ai/blog/on-policy-distillation/).
    `kl_coefficient` is the weight of the KL in the reward, if the KL is placed there. `greedy` has
    the reward of the greedy response to each group's prompt, if the estimator needs it.
    """
    sampler = scores[SAMPLER_LOGPROBS]
    order, ends_S = _whole_episodes(batch)
    ordered = [batch.trajectories[i] for i in order[ends_S]]

    def join(entries: Entries) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([entries[i] for i in order]))

    shaping = _kl_of_rewards(batch, scores, algorithm)
    placed = learned_columns(batch.trajectories, [TOKEN_REWARDS])
    ends_L = np.cumsum([0, *(len(sampler[i]) for i in order)])
    inputs = AdvantageInputs(
        parts_SR=torch.tensor([[p.value for p in t.rewards] for t in ordered], dtype=torch.float64),
        weights_R=torch.tensor([p.weight for p in ordered[0].rewards], dtype=torch.float64),
        shaping_L=torch.zeros(ends_L[-1]) if shaping is None else -kl_coefficient * join(shaping),
        cu_loss_tokens=torch.from_numpy(ends_L[[0, *(ends_S + 1)]]),
        placed_L=join(placed[TOKEN_REWARDS]) if placed else None,
    )
    given: dict[AdvantageNeed, torch.Tensor] = {
        "group_S": torch.tensor([t.group for t in ordered]),
    }
    if VALUES in scores:
        given["values_L"] = join(scores[VALUES])
    if "greedy_S" in advantage_needs(algorithm.advantage):
        greedy_S = [greedy[t.group] for t in ordered]
        given["greedy_S"] = torch.tensor(greedy_S, dtype=torch.float64)
    if "turn_L" in advantage_needs(algorithm.advantage):
        given["turn_L"] = join([own for e in batch.episodes for own in turn_numbers(e)])
    estimates = advantage(algorithm.advantage)(inputs, given)
    advantages = divide(estimates.advantages_L.float().numpy(), order, sampler)
    if TEACHER_LOGPROBS in scores:
        pairs = zip(scores[TEACHER_LOGPROBS], policy_logprobs(scores), strict=True)
        ahead = [algorithm.distill_weight * (teacher - policy) for teacher, policy in pairs]
        advantages = [own + more for own, more in zip(advantages, ahead, strict=True)]
    estimated: dict[Column, Entries] = {ADVANTAGES: advantages}
    if estimates.returns_L is not None:
        estimated[RETURNS] = divide(estimates.returns_L.float().numpy(), order, sampler)
    return estimated


def _whole_episodes(batch: Batch) -> tuple[Ints, Ints]:
    """Return an order in which each episode's branches are adjacent, and where episodes end.

    Episodes are in the order of the packs. The first result has the numbers of the trajectories,
    the second the place of each episode's last branch among them.
    """
    order = packed_order(batch.minis)
    counts = [len(episode.branches) for episode in batch.episodes]
    episode_S = np.repeat(np.arange(len(counts)), counts)[order]
    _, first, number = np.unique(episode_S, return_index=True, return_inverse=True)
    places = np.lexsort((order, first[number]))
    return order[places], np.flatnonzero(np.diff(episode_S[places], append=-1))


def turn_numbers(episode: Trajectory) -> list[Ints]:
    """Return an array for each branch: for each learned token, the number of its turn, from 0."""
    by_branch, first = [], 0
    for branch in episode.branches:
        numbers = np.full(len(branch.response_tokens), first)
        for number, turn in enumerate(branch.turns, first):
            numbers[turn.begin : turn.end] = number
        by_branch.append(numbers[branch.loss_mask])
        first += max(1, len(branch.turns))
    return by_branch


def _kl_of_rewards(batch: Batch, scores: BatchColumns, algorithm: RlAlgorithm) -> Entries | None:
    """Return the KL of each token from the reference if it is a part of the reward, else None."""
    if REFERENCE_LOGPROBS not in scores or algorithm.kl is None or algorithm.kl.place != "reward":
        return None
    order, policy = packed_order(batch.minis), policy_logprobs(scores)
    policy_L, reference_L = (
        torch.from_numpy(np.concatenate([entries[i] for i in order]))
        for entries in (policy, scores[REFERENCE_LOGPROBS])
    )
    return divide(kl(policy_L, reference_L, algorithm.kl.estimator).numpy(), order, policy)


def has_kl_loss(algorithm: RlAlgorithm) -> bool:
    """Return whether the actor's loss has a term for the KL from the reference."""
    return algorithm.kl is not None and algorithm.kl.place == "loss"


def policy_terms(algorithm: RlAlgorithm, longest: int, kl_coefficient: float) -> PolicyTerms:
    """Return the terms of the actor's objective; `longest` are the most tokens of a response."""
    kl = algorithm.kl or KlConfig()
    return PolicyTerms(
        algorithm.aggregation,
        constant=algorithm.aggregation_tokens or longest,
        kl_estimator=kl.estimator,
        kl_coefficient=kl_coefficient if has_kl_loss(algorithm) else 0.0,
        ratio_corrected=kl.ratio_corrected,
        entropy_bonus=algorithm.entropy_bonus,
    )


def policy_columns(columns: BatchColumns, kl_loss: bool) -> BatchColumns:
    """Return the columns of the policy loss; the reference's log-probs only if `kl_loss` is set."""
    return {
        column: entries
        for column, entries in columns.items()
        if column.in_policy_loss and (kl_loss or column != REFERENCE_LOGPROBS)
    }


def batch_metrics(batch: Batch, scores: BatchColumns, kl_coefficient: float) -> dict[str, float]:
    """Return `trajectory_metrics`, and how far the policy is from a reference and a teacher.

    `teacher_divergence` is the mean over tokens of log policy - log teacher (nats).
    """
    metrics = trajectory_metrics(batch.episodes)
    if TEACHER_LOGPROBS in scores:
        gaps = [*_gaps(scores, TEACHER_LOGPROBS)]
        in_order = [gaps[i] for i in packed_order(batch.minis)]
        metrics["teacher_divergence"] = float(np.mean(np.concatenate(in_order)))
    if REFERENCE_LOGPROBS in scores:
        metrics |= {
            "kl": observed_kl(batch, scores),
            "kl_per_token": observed_kl_per_token(batch, scores),
            "kl_coefficient": kl_coefficient,
        }
    return metrics


def trajectory_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Return the means over trajectories of rewards, lengths, endings and repetition, by name.

    What decides the rewards is in `gaming_figures`. The spread of the rewards is theirs over all
    trajectories, with the population's deviation.
    """
    return {
        **_reward_metrics(trajectories),
        "response_tokens": fmean(len(t.response_tokens) for t in trajectories),
        "finished": fmean(t.finish_reason == "stop" for t in trajectories),
        "truncated": fmean(t.finish_reason == "length" for t in trajectories),
        "repetition": repeating([t.response_tokens for t in trajectories]),
        **episode_metrics(trajectories),
    }


def _reward_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Return the figures of the rewards; if none has a weight, the mean of each alone."""
    rewards, parts = [t.reward for t in trajectories], trajectories[0].rewards
    means = {
        f"reward/{part.name}": mean(t.rewards[i].value for t in trajectories)
        for i, part in enumerate(parts)
    }
    if not any(part.weight for part in parts):
        return means
    return {
        "reward": mean(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "reward_std": _deviation(rewards),
        **means,
        **gaming_figures(trajectories),
        "zero_signal": zero_signal(trajectories),
    }


def _deviation(rewards: Sequence[float]) -> float:
    """Return the population's standard deviation; NaN if a reward is not finite."""
    with np.errstate(invalid="ignore"):
        return float(np.std(rewards))


def episode_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Return the mean of each figure over the episodes that have it, as `episode/<name>`.

    If engines report their prefix caches, `rollout/prefix_cache_hits` is the share of all turns'
    prompt tokens that were cached. The result is empty if no environment played.
    """
    figures = [t.figures for t in trajectories if t.turns]
    names = dict.fromkeys(name for episode in figures for name in episode)
    metrics = {
        f"episode/{n}": mean(episode[n] for episode in figures if n in episode) for n in names
    }
    prompts = sum(episode.get(PROMPT_TOKENS, 0.0) for episode in figures)
    if prompts:
        cached = sum(episode.get(CACHED_TOKENS, 0.0) for episode in figures)
        metrics["rollout/prefix_cache_hits"] = cached / prompts
    return metrics


def zero_signal(trajectories: list[Trajectory]) -> float:
    """Return the share of all groups that have several responses with equal rewards."""
    rewards: dict[int, list[float]] = {}
    for t in trajectories:
        rewards.setdefault(t.group, []).append(t.reward)
    return fmean(len(group) > 1 and min(group) == max(group) for group in rewards.values())


def observed_kl(batch: Batch, scores: BatchColumns) -> float:
    """Return the mean KL per response from the reference (k1 summed over tokens), nats."""
    gaps = _gaps(scores, REFERENCE_LOGPROBS)
    return math.fsum(float(gaps_L.sum()) for gaps_L in gaps) / len(batch.episodes)


def observed_kl_per_token(batch: Batch, scores: BatchColumns) -> float:
    """Return the mean over responses of the mean KL of their tokens from the reference (k1), nats.

    Responses without learned tokens do not count.
    """
    gaps = _gaps(scores, REFERENCE_LOGPROBS)
    of_episodes = (
        np.concatenate([next(gaps) for _ in episode.branches]) for episode in batch.episodes
    )
    return fmean([float(gaps_L.mean()) for gaps_L in of_episodes if len(gaps_L)] or [0.0])


def _gaps(scores: BatchColumns, other: Column) -> Iterator[Floats]:
    """Yield the policy's log-probs minus those of another column."""
    pairs = zip(policy_logprobs(scores), scores[other], strict=True)
    return (own - its for own, its in pairs)


def with_columns(
    episodes: Sequence[Trajectory], batch: Batch, columns: BatchColumns
) -> list[Trajectory]:
    """Return a batch's episodes with columns of its learned tokens; other tokens have 0 there."""
    numbers = iter(range(len(batch.trajectories)))

    def add(branch: Trajectory) -> Trajectory:
        number = next(numbers)
        spread = batch.trajectories[number].spread
        return branch.add_columns({c: spread(entries[number]) for c, entries in columns.items()})

    return [episode.change_branches(add) for episode in episodes]
