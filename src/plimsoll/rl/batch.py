"""Pack the trajectories of a step, score them, estimate advantages, and report their metrics.

Trajectories are packed once, mini-batch by mini-batch. Scoring and training use the same packs, and
one layout says where each learned token is in every column (see `ColumnLayout`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

import numpy as np
import torch

from plimsoll.algorithm.choice import advantage
from plimsoll.algorithm.inputs import AdvantageInputs
from plimsoll.algorithm.policy_objective import PolicyTerms
from plimsoll.algorithm.ratios import kl
from plimsoll.cluster.protocol import Cluster, group_of
from plimsoll.config.cluster import MAIN_RANKS
from plimsoll.config.rl import KlConfig, RlAlgorithm, RlConfig
from plimsoll.records import Floats, Ints, Pack, Trajectory
from plimsoll.resolve.choices import AdvantageNeed, advantage_needs
from plimsoll.resolve.roles import Role, RoleName
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.rl.layout import ColumnLayout, MiniBatch, lay_out
from plimsoll.run.health import gaming_figures, repeating
from plimsoll.run.numbers import mean
from plimsoll.run.trajectories import TokenScores
from plimsoll.sampler.protocol import CACHED_TOKENS, PROMPT_TOKENS
from plimsoll.train.session import mean_metrics
from plimsoll.train.update import OptimizerStep, Packs, teach, update
from plimsoll.trainer.objectives import PolicyStream
from plimsoll.trainer.protocol import Objective
from plimsoll.trainer.schedule import learning_rate
from plimsoll.trainer.worker import Worker

S = TypeVar("S")


@dataclass(frozen=True)
class Batch:
    """The trajectories of a step, packed.

    Attributes:
        episodes: the episodes that were sampled.
        trajectories: the branches of each episode, episode after episode; each is a sequence.
        layout: the layout for the actor's ranks; all columns are in its order.
        critic_layout: the layout for the critic's ranks; the same object if both are equal.
        seed: (seed of the run, step), from which the order of the mini-batches is drawn.
    """

    episodes: list[Trajectory]
    trajectories: list[Trajectory]
    layout: ColumnLayout
    critic_layout: ColumnLayout
    seed: tuple[int, int]

    def schedule(self, layout: ColumnLayout, epochs: int) -> Iterator[tuple[int, MiniBatch]]:
        """Yield (update number from 0, mini-batch) of all epochs; each epoch is shuffled anew."""
        rng = np.random.default_rng([*self.seed, 1])
        order = (i for _ in range(epochs) for i in rng.permutation(len(layout.minis)))
        for number, index in enumerate(order):
            yield number, layout.minis[index]


def token_count(episodes: Sequence[Trajectory]) -> int:
    """Return the number of prompt and response tokens of all branches of the episodes."""
    branches = [branch for episode in episodes for branch in episode.branches]
    return sum(len(t.prompt.tokens) + len(t.response_tokens) for t in branches)


@dataclass(frozen=True)
class Scores:
    """Log-probs (nats) and values of a batch's learned tokens, before the batch trains a model.

    Attributes:
        sampler_L: the sampler's log-probs.
        old_L: the actor's log-probs by the trainer; None in a step with a single update, where the
            policy that learns still is the old policy (see `RunSpec.scores_before_learning`).
        reference_L: the reference's log-probs; None without a reference.
        values_L: the critic's values; None without a critic.
        teacher_L: the teacher's log-probs; None without a teacher, or if the actor learns from its
            whole distributions.
    """

    sampler_L: Floats
    old_L: Floats | None = None
    reference_L: Floats | None = None
    values_L: Floats | None = None
    teacher_L: Floats | None = None

    @property
    def policy_L(self) -> Floats:
        """The old policy's log-probs: the trainer's if it scored them, else the sampler's."""
        return self.sampler_L if self.old_L is None else self.old_L


@dataclass(frozen=True)
class Learnables:
    """What the losses learn from, for each learned token.

    Attributes:
        advantages_L: the advantages, for the policy loss.
        returns_L: the returns, the targets of the value loss; None without a critic.
    """

    advantages_L: Floats
    returns_L: Floats | None


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

    def lay_out_for(minis: int, ranks: int) -> ColumnLayout:
        members = [
            np.concatenate([places[i] for i in episode_numbers])
            for episode_numbers in np.split(shuffled, minis)
        ]
        return lay_out(trajectories, members, ranks, spec.workload.budget, beside=beside)

    layout = lay_out_for(algorithm.mini_batches, ranks)
    critic_minis = algorithm.critic_mini_batches or algorithm.mini_batches
    same = (critic_minis, critic_ranks) == (algorithm.mini_batches, ranks)
    critics = layout if same else lay_out_for(critic_minis, critic_ranks)
    return Batch(episodes, trajectories, layout, critics, seed)


def masked(episodes: list[Trajectory], algorithm: RlAlgorithm) -> list[Trajectory]:
    """Return the episodes; with `mask_truncated` those that were cut off learn no token."""
    if not algorithm.mask_truncated:
        return episodes
    return [_unlearned(e) if e.finish_reason == "length" else e for e in episodes]


def _unlearned(episode: Trajectory) -> Trajectory:
    """Return an episode of which no token is learned."""
    branches = [replace(t, loss_mask=np.zeros_like(t.loss_mask)) for t in episode.branches]
    return replace(branches[-1], earlier=tuple(branches[:-1]))


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


def score(batch: Batch, spec: RunSpec[RlConfig], cluster: Cluster) -> Scores:
    """Return the log-probs and values that the run's roles compute for the batch."""
    layout, columns = batch.layout, dict[str, Floats]()
    for name, role in spec.roles.items():
        if role.head == "states":
            [mini] = layout.minis
            teach(name, cluster.shortages.split(spec.sender.name, mini.packs, unit=1), cluster)
        elif role.column and (spec.scores_before_learning or not role.sends):
            task = Worker.values if role.head == "value" else Worker.log_probs
            own = layout if role.group == MAIN_RANKS else batch.critic_layout
            column_L = own.score(group_of(cluster, role), task, name)
            columns[role.column] = own.move_to(column_L, layout)
    sampler_L = layout.column([t.sampler_logprobs[t.loss_mask] for t in batch.trajectories])
    return Scores(sampler_L, **columns)


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
    layout: ColumnLayout,
    role: Role,
    spec: RunSpec[RlConfig],
    cluster: Cluster,
    step: int,
    objective: Objective[S],
    stream: Callable[[Pack], S] | RoleName,
    loss: str,
) -> dict[str, float]:
    """Train a role on all epochs and mini-batches; return the means of the updates' metrics.

    `step`: the steps before this one. `stream`: that of an `OptimizerStep`. `loss`: the metric's
    name for the loss.
    """
    name, group, results = role.name, group_of(cluster, role), []
    for number, mini in batch.schedule(layout, spec.config.algorithm.epochs):
        packs: Packs = mini.packs
        if isinstance(stream, RoleName):
            packs = group.shortages.split(name, packs, unit=1)  # as the teacher read them
        rate = rate_of(role, spec, len(layout.minis), step, number)
        optimizer_step = OptimizerStep(packs, mini.counts, objective, stream)
        results.append(update(name, group, optimizer_step, rate))
    metrics = mean_metrics(results)
    return metrics | {
        loss: metrics.pop("loss"),
        f"{name}/grad_norm": metrics.pop("grad_norm"),
        f"{name}/skipped_steps": metrics.pop("skipped_steps"),
    }


def estimate_advantages(
    batch: Batch,
    scores: Scores,
    algorithm: RlAlgorithm,
    kl_coefficient: float,
    greedy: Mapping[int, float],
) -> Learnables:
    """Return the advantages (and returns) that the configured estimator gives for the batch.

    The estimator gets each episode as one sequence, which joins the episode's branches. With a
    teacher's log-probs, distill_weight * (teacher - policy) of the sampled token is added: the
    policy gradient of the reverse KL at that token, without what follows it (a discount of 0; Lu et
    al. 2025, https://thinkingmachines.ai/blog/on-policy-distillation/).
    `kl_coefficient` is the weight of the KL in the reward, if the KL is placed there. `greedy` has
    the reward of the greedy response to each group's prompt, if the estimator needs it.
    """
    layout = batch.layout
    whole, ends_S = _whole(batch)
    ordered = [batch.trajectories[i] for i in whole.trajectory_S[ends_S]]
    kl_L = _kl_of_rewards(scores, algorithm)
    inputs = AdvantageInputs(
        parts_SR=torch.tensor([[p.value for p in t.rewards] for t in ordered], dtype=torch.float64),
        weights_R=torch.tensor([p.weight for p in ordered[0].rewards], dtype=torch.float64),
        shaping_L=(
            torch.zeros(len(scores.sampler_L))
            if kl_L is None
            else -kl_coefficient * torch.from_numpy(layout.move_to(kl_L, whole))
        ),
        cu_loss_tokens=torch.from_numpy(whole.cu_loss_tokens[[0, *(ends_S + 1)]]),
        placed_L=_token_rewards(batch, whole),
    )
    given: dict[AdvantageNeed, torch.Tensor] = {
        "group_S": torch.tensor([t.group for t in ordered]),
    }
    if scores.values_L is not None:
        given["values_L"] = torch.from_numpy(layout.move_to(scores.values_L, whole))
    if "greedy_S" in advantage_needs(algorithm.advantage):
        greedy_S = [greedy[t.group] for t in ordered]
        given["greedy_S"] = torch.tensor(greedy_S, dtype=torch.float64)
    if "turn_L" in advantage_needs(algorithm.advantage):
        turns = [
            branch_turns for episode in batch.episodes for branch_turns in turn_numbers(episode)
        ]
        given["turn_L"] = torch.from_numpy(np.concatenate([turns[i] for i in whole.trajectory_S]))
    estimates = advantage(algorithm.advantage)(inputs, given)

    def back(column_L: torch.Tensor) -> Floats:
        return whole.move_to(column_L.float().numpy(), layout)

    advantages_L = back(estimates.advantages_L)
    if scores.teacher_L is not None:
        of_teacher_L = algorithm.distill_weight * (scores.teacher_L - scores.policy_L)
        advantages_L = advantages_L + of_teacher_L
    return Learnables(
        advantages_L=advantages_L,
        returns_L=None if estimates.returns_L is None else back(estimates.returns_L),
    )


def _whole(batch: Batch) -> tuple[ColumnLayout, Ints]:
    """Return a layout in which each episode's branches are adjacent, and where episodes end.

    The second result gives the number of each episode's last sequence in this layout, [episodes].
    """
    layout = batch.layout
    if len(batch.episodes) == len(batch.trajectories):
        return layout, np.arange(len(layout.trajectory_S))
    counts = [len(episode.branches) for episode in batch.episodes]
    episode_S = np.repeat(np.arange(len(counts)), counts)[layout.trajectory_S]
    _, first, number = np.unique(episode_S, return_index=True, return_inverse=True)
    order = np.lexsort((layout.trajectory_S, first[number]))
    lengths = np.diff(layout.cu_loss_tokens)[order]
    whole = ColumnLayout([], layout.trajectory_S[order], np.cumsum([0, *lengths]))
    return whole, np.flatnonzero(np.diff(episode_S[order], append=-1))


def _token_rewards(batch: Batch, whole: ColumnLayout) -> torch.Tensor | None:
    """Return environments' rewards of single tokens in the order of `whole`; None if none exist."""
    trajectories = batch.trajectories
    rewards = [t.token_rewards[t.loss_mask] for t in trajectories if t.token_rewards is not None]
    return torch.from_numpy(whole.column(rewards)) if rewards else None


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


def _kl_of_rewards(scores: Scores, algorithm: RlAlgorithm) -> Floats | None:
    if scores.reference_L is None or algorithm.kl is None or algorithm.kl.place != "reward":
        return None
    policy_L, reference_L = map(torch.from_numpy, (scores.policy_L, scores.reference_L))
    kl_L: Floats = kl(policy_L, reference_L, algorithm.kl.estimator).numpy()
    return kl_L


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


def policy_stream(
    batch: Batch, scores: Scores, advantages_L: Floats, kl_loss: bool
) -> Callable[[Pack], PolicyStream]:
    """Return a function of a pack that gives the policy loss's columns for its learned tokens.

    The reference's log-probs are None unless `kl_loss` is set.
    """

    def part_of(column_L: Floats | None, pack: Pack) -> Floats | None:
        return None if column_L is None else batch.layout.of_pack(column_L, pack)

    return lambda pack: PolicyStream(
        advantages_L=batch.layout.of_pack(advantages_L, pack),
        sampler_logprobs_L=batch.layout.of_pack(scores.sampler_L, pack),
        old_logprobs_L=part_of(scores.old_L, pack),
        reference_logprobs_L=part_of(scores.reference_L if kl_loss else None, pack),
    )


def batch_metrics(batch: Batch, scores: Scores, kl_coefficient: float) -> dict[str, float]:
    """Return `trajectory_metrics`, and how far the policy is from a reference and a teacher.

    `teacher_divergence` is the mean over tokens of log policy - log teacher (nats).
    """
    metrics = trajectory_metrics(batch.episodes)
    if scores.teacher_L is not None:
        metrics["teacher_divergence"] = float(np.mean(scores.policy_L - scores.teacher_L))
    if scores.reference_L is not None:
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


def observed_kl(batch: Batch, scores: Scores) -> float:
    """Return the mean KL per response from the reference (k1 summed over tokens), nats."""
    gaps = _gaps(batch, scores)
    return math.fsum(float(gaps_L.sum()) for gaps_L in gaps) / len(batch.episodes)


def observed_kl_per_token(batch: Batch, scores: Scores) -> float:
    """Return the mean over responses of the mean KL of their tokens from the reference (k1), nats.

    Responses without learned tokens do not count.
    """
    gaps = iter(_gaps(batch, scores))
    of_episodes = [
        np.concatenate([next(gaps) for _ in episode.branches]) for episode in batch.episodes
    ]
    return fmean([float(gaps_L.mean()) for gaps_L in of_episodes if len(gaps_L)] or [0.0])


def _gaps(batch: Batch, scores: Scores) -> list[Floats]:
    assert scores.reference_L is not None
    return batch.layout.by_trajectory(scores.policy_L - scores.reference_L)


def token_scores(batch: Batch, scores: Scores, learnables: Learnables) -> TokenScores:
    """Return the numbers of each branch's response tokens, to be written.

    Tokens that are not learned get 0.
    """

    def of_responses(column_L: Floats | None) -> list[Floats] | None:
        if column_L is None:
            return None
        by_trajectory = batch.layout.by_trajectory(column_L)
        return [_spread(t, x) for t, x in zip(batch.trajectories, by_trajectory, strict=True)]

    return TokenScores(
        advantages=of_responses(learnables.advantages_L),
        trainer_logprobs=of_responses(scores.old_L),
        reference_logprobs=of_responses(scores.reference_L),
        values=of_responses(scores.values_L),
        teacher_logprobs=of_responses(scores.teacher_L),
        returns=of_responses(learnables.returns_L),
    )


def _spread(trajectory: Trajectory, learned: Floats) -> Floats:
    spread = np.zeros(len(trajectory.response_tokens), dtype=np.float32)
    spread[trajectory.loss_mask] = learned
    return spread
