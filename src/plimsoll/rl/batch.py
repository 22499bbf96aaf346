"""A step's trajectories on their way to the losses: packs, scores, advantages, streams.

Trajectories are packed once, mini-batch by mini-batch; scoring and training use the same packs.
Per-token arrays belong to trajectories (one number per response token) until a pack asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

import numpy as np
import torch

from plimsoll.algorithm.choice import advantage
from plimsoll.algorithm.inputs import AdvantageInputs
from plimsoll.algorithm.kl import kl
from plimsoll.algorithm.token_rewards import token_rewards
from plimsoll.algorithm.whiten import whiten
from plimsoll.cluster.protocol import Cluster, ranks_of
from plimsoll.config.rl import RlConfig
from plimsoll.data.packing import pack
from plimsoll.engine.objectives.policy import PolicyStream
from plimsoll.engine.worker import Worker
from plimsoll.records import (
    BatchCounts,
    Floats,
    Ints,
    Pack,
    Sample,
    Trajectory,
    from_packed,
    to_packed,
)
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.session import mean_metrics
from plimsoll.train.update import Step, update

S = TypeVar("S")


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step sees.

    members: which trajectories of the batch; packs: by rank, their samples_S index `members`.
    critic_packs: the same for the critic's ranks.
    """

    members: Ints
    packs: list[list[Pack]]
    critic_packs: list[list[Pack]]
    counts: BatchCounts

    def packs_of(self, role: RoleName) -> list[list[Pack]]:
        """By rank of the group that hosts the role."""
        return self.critic_packs if role == "critic" else self.packs


@dataclass(frozen=True)
class Batch:
    """A step's trajectories, packed."""

    trajectories: list[Trajectory]
    minis: list[MiniBatch]
    seed: tuple[int, int]

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of all trajectories."""
        return sum(len(t.prompt.tokens) + len(t.response_tokens) for t in self.trajectories)

    def schedule(self, epochs: int) -> Iterator[tuple[int, MiniBatch]]:
        """(update number, mini-batch): every epoch in an order of its own."""
        rng = np.random.default_rng([*self.seed, 1])
        order = (i for _ in range(epochs) for i in rng.permutation(len(self.minis)))
        for number, index in enumerate(order):
            yield number, self.minis[index]


@dataclass(frozen=True)
class Scores:
    """Per trajectory, per response token. policy: log-probs of the policy that sampled, by the
    trainer (`recomputed`) or, in strictly on-policy steps, by the sampler."""

    policy: list[Floats]
    recomputed: bool
    reference: list[Floats] | None


@dataclass(frozen=True)
class Learnables:
    """Per trajectory, per response token: what the losses aim at. kl: KL estimates, in nats."""

    advantages: list[Floats]
    returns: list[Floats]
    kl: list[Floats] | None


def pack_batch(
    trajectories: list[Trajectory],
    spec: RunSpec[RlConfig],
    ranks: int,
    critic_ranks: int,
    step: int,
) -> Batch:
    """Divide the trajectories into mini-batches at random, and each into packs for the ranks."""
    budget = spec.workload.budget
    seed = (spec.run.seed, step)
    shuffled = np.random.default_rng([*seed, 0]).permutation(len(trajectories))
    minis = []
    for members in np.split(shuffled, spec.config.algorithm.mini_batches):
        samples = [_sample(trajectories[i]) for i in members]
        counts = BatchCounts.of(samples)
        packs = pack(samples, ranks, budget)
        critic_packs = packs if critic_ranks == ranks else pack(samples, critic_ranks, budget)
        minis.append(MiniBatch(members, packs, critic_packs, counts))
    return Batch(trajectories, minis, seed)


def _sample(trajectory: Trajectory) -> Sample:
    prompt, response = trajectory.prompt.tokens, trajectory.response_tokens
    loss_mask = np.concatenate([np.zeros(len(prompt), np.bool_), trajectory.loss_mask])
    return Sample(np.concatenate([prompt, response]), loss_mask)


def score(batch: Batch, spec: RunSpec[RlConfig], cluster: Cluster) -> Scores:
    """Reference log-probs, and the policy's log-probs where several updates need them."""
    several = spec.workload.updates > 1
    sampled = [t.sampler_logprobs[t.loss_mask] for t in batch.trajectories]
    with_reference = "reference" in spec.roles
    return Scores(
        policy=by_trajectory(batch, cluster, Worker.log_probs, "actor") if several else sampled,
        recomputed=several,
        reference=(
            by_trajectory(batch, cluster, Worker.log_probs, "reference") if with_reference else None
        ),
    )


def by_trajectory(
    batch: Batch,
    cluster: Cluster,
    task: Callable[[Worker, RoleName, Sequence[Pack]], list[Floats]],
    role: RoleName,
) -> list[Floats]:
    """Have all ranks score all packs of the batch; one array per trajectory."""
    group = ranks_of(cluster, role)
    every = zip(*(mini.packs_of(role) for mini in batch.minis), strict=True)
    packs = [[pack for mini in own for pack in mini] for own in every]
    answers = [iter(own) for own in group.each(task, [(role, own) for own in packs])]
    found: list[Floats] = [np.zeros(0, dtype=np.float32)] * len(batch.trajectories)
    for mini in batch.minis:
        by_rank = mini.packs_of(role)
        flat_packs = [pack for own in by_rank for pack in own]
        flat_values = [next(i) for i, own in zip(answers, by_rank, strict=True) for _ in own]
        arrays = from_packed(flat_packs, flat_values, len(mini.members))
        for member, array in zip(mini.members, arrays, strict=True):
            found[member] = array
    return found


def train_on(
    batch: Batch,
    role: RoleName,
    cluster: Cluster,
    epochs: int,
    step: Callable[[MiniBatch], Step[S]],
    rate: Callable[[int], float],
) -> dict[str, float]:
    """All epochs and mini-batches of a role that learns; the means of their metrics. rate: at an
    update of the batch, from 0."""
    group = ranks_of(cluster, role)
    updates = batch.schedule(epochs)
    return mean_metrics([update(role, group, step(mini), rate(n)) for n, mini in updates])


def estimate_advantages(
    batch: Batch,
    scores: Scores,
    values: list[Floats],
    spec: RunSpec[RlConfig],
    kl_coefficient: float,
) -> Learnables:
    """Token rewards, then the configured estimator over the whole batch, whitened if asked.
    values: the critic's."""
    algorithm = spec.config.algorithm
    cu_loss_tokens = _offsets(scores.policy)
    kl_L = None
    if scores.reference is not None:
        kl_L = kl(_flat(scores.policy), _flat(scores.reference), algorithm.kl.estimator)
    rewards_L = token_rewards(
        torch.tensor([t.reward for t in batch.trajectories], dtype=torch.float32),
        kl_L if algorithm.kl.place == "reward" else None,
        cu_loss_tokens,
        kl_coefficient,
    )
    inputs = AdvantageInputs(
        rewards_L=rewards_L,
        values_L=_flat(values),
        cu_loss_tokens=cu_loss_tokens,
        prompt_S=torch.tensor([t.group for t in batch.trajectories]),
    )
    found = advantage(algorithm.advantage)(inputs)
    advantages_L = found.advantages_L
    if algorithm.whiten_advantages:
        advantages_L = whiten(advantages_L)
    return Learnables(
        advantages=_cut(advantages_L, cu_loss_tokens),
        returns=_cut(found.returns_L, cu_loss_tokens),
        kl=None if kl_L is None else _cut(kl_L, cu_loss_tokens),
    )


def policy_stream(
    mini: MiniBatch, scores: Scores, advantages: list[Floats], kl_loss: bool
) -> Callable[[Pack], PolicyStream]:
    """What the policy loss needs beside each pack of a mini-batch."""

    def own(arrays: list[Floats] | None) -> list[Floats] | None:
        return None if arrays is None else [arrays[i] for i in mini.members]

    own_advantages = [advantages[i] for i in mini.members]
    old = own(scores.policy if scores.recomputed else None)
    reference = own(scores.reference if kl_loss else None)
    return lambda pack: PolicyStream(
        advantages_L=to_packed(pack, own_advantages),
        old_logprobs_L=None if old is None else to_packed(pack, old),
        reference_logprobs_L=None if reference is None else to_packed(pack, reference),
    )


def batch_metrics(batch: Batch, scores: Scores, learnables: Learnables) -> dict[str, float]:
    """What the batch says of the policy: rewards, KL, lengths, and how well sampler and trainer
    agree."""
    trajectories = batch.trajectories
    metrics = {
        "reward": fmean(t.reward for t in trajectories),
        **{
            f"reward/{part.name}": fmean(t.rewards[i].value for t in trajectories)
            for i, part in enumerate(trajectories[0].rewards)
        },
        "response_tokens": fmean(len(t.response_tokens) for t in trajectories),
        "finished": fmean(t.finish_reason == "stop" for t in trajectories),
    }
    if learnables.kl is not None:
        metrics["kl"] = observed_kl(scores)
    if scores.recomputed:
        sampled = np.concatenate([t.sampler_logprobs for t in trajectories])
        metrics["logprob_gap"] = float(np.abs(sampled - np.concatenate(scores.policy)).mean())
    return metrics


def observed_kl(scores: Scores) -> float:
    """The mean KL per response from the reference (k1 summed over tokens), nats."""
    assert scores.reference is not None
    gaps = zip(scores.policy, scores.reference, strict=True)
    return fmean(float((policy - reference).sum()) for policy, reference in gaps)


def mean_advantages(learnables: Learnables) -> list[float]:
    """Each trajectory's mean advantage."""
    return [float(a.mean()) if len(a) else 0.0 for a in learnables.advantages]


def _flat(arrays: Sequence[Floats]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _offsets(arrays: Sequence[Floats]) -> torch.Tensor:
    return torch.tensor(np.cumsum([0, *(len(a) for a in arrays)]))


def _cut(flat_L: torch.Tensor, cu_loss_tokens: torch.Tensor) -> list[Floats]:
    pieces: list[Floats] = np.split(flat_L.float().numpy(), cu_loss_tokens[1:-1].numpy())
    return pieces
