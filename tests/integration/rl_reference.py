"""A step of reinforcement learning in plain PyTorch and transformers: one process, every sequence
by itself, whole logits, sums and means written out, torch's AdamW. Of Plimsoll's only the functions
that a config chooses, on whole mini-batches; they have tests of their own, by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from engine_cases import CLIP_VALUE
from engine_reference import Weights, plain_critic, plain_logprobs, plain_policy, plain_values
from rl_cases import BONUS, CONSTANT, GREEDY, KL, PARTS, RATE, Case
from torch import Tensor

from plimsoll.algorithm.choice import advantage, correction, policy_loss
from plimsoll.algorithm.inputs import (
    AdvantageInputs,
    Advantages,
    CorrectionInputs,
    PolicyLossInputs,
)
from plimsoll.algorithm.policy_objective import PolicyObjectiveInputs
from plimsoll.config.base import Choice
from plimsoll.records import SAMPLER_LOGPROBS, Sample, Trajectory

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class PlainRole:
    """A role that learned. metrics: their means over the updates."""

    metrics: dict[str, float]
    before: Weights
    after: Weights


@dataclass(frozen=True)
class PlainRl:
    """advantages: of each trajectory, a number for each of its learned tokens. roles: those that
    learned, by their names."""

    advantages: list[list[float]]
    roles: dict[str, PlainRole]


@dataclass(frozen=True)
class _Scored:
    """A step's trajectories, and per trajectory one tensor of each column."""

    case: Case
    sampled: Sequence[Trajectory]
    samples: list[Sample]
    sampler: list[Tensor]
    old: list[Tensor]
    reference: list[Tensor]
    values: list[Tensor]

    @property
    def lengths(self) -> list[int]:
        return [len(x) for x in self.sampler]


def plain_rl(
    case: Case,
    sampled: Sequence[Trajectory],
    model: Path,
    other: Path,
    updates: Mapping[str, Sequence[Sequence[int]]],
) -> PlainRl:
    """Score, estimate, learn. updates: of each role, which trajectories each update sees."""
    with_values = case.advantage.startswith("gae")
    actor, critic = plain_policy(model), plain_critic(other) if with_values else None
    scored = _scored(case, sampled, actor, critic, other)
    estimated = _estimated(scored)
    advantages = list(estimated.advantages_L.split(scored.lengths))

    def of_actor(members: Sequence[int]) -> Metrics:
        return _actor_loss(scored, actor, advantages, members)

    def of_critic(members: Sequence[int]) -> Metrics:
        assert estimated.returns_L is not None
        return _critic_loss(scored, critic, estimated.returns_L.split(scored.lengths), members)

    roles = {"actor": _learned(actor, of_actor, updates["actor"])}
    if critic is not None:
        roles["critic"] = _learned(critic, of_critic, updates["critic"])
    return PlainRl([x.tolist() for x in advantages], roles)


def distance(got: Weights, run: PlainRole) -> float:
    """How far weights are from the reference's, as a share of the way that the reference went, of
    the worst tensor."""
    assert got.keys() == run.after.keys()
    return max(
        float((got[n] - run.after[n]).norm() / (run.after[n] - run.before[n]).norm()) for n in got
    )


def _scored(
    case: Case, sampled: Sequence[Trajectory], actor: Any, critic: Any, other: Path
) -> _Scored:
    samples = [_sample(t) for t in sampled]
    reference = None if case.kl == "none" else plain_policy(other)
    with torch.no_grad():
        return _Scored(
            case,
            sampled,
            samples,
            sampler=[torch.from_numpy(t.sampler_logprobs[t.loss_mask]) for t in sampled],
            old=[plain_logprobs(actor, s)[0] for s in samples],
            reference=[plain_logprobs(reference, s)[0] for s in samples if reference],
            values=[plain_values(critic, s) for s in samples if critic],
        )


def _sample(t: Trajectory) -> Sample:
    unlearned = np.zeros(len(t.prompt.tokens), dtype=np.bool_)
    return Sample(
        np.concatenate([t.prompt.tokens, t.response_tokens]),
        np.concatenate([unlearned, t.loss_mask]),
    )


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)])


def _estimated(scored: _Scored) -> Advantages:
    """Return the advantages of the whole step, in the order in which it was sampled."""
    case, sampled = scored.case, scored.sampled
    shaping = torch.zeros(sum(scored.lengths))
    if case.kl == "reward":
        policy = scored.old if case.mini_batches > 1 else scored.sampler
        shaping = -KL * (torch.cat(policy) - torch.cat(scored.reference))
    groups = [t.group for t in sampled]
    given: dict[Any, Tensor] = {
        "group_S": torch.tensor(groups),
        "turn_L": torch.zeros(sum(scored.lengths), dtype=torch.int64),
        "greedy_S": torch.tensor([GREEDY[g] for g in groups], dtype=torch.float64),
        **({"values_L": torch.cat(scored.values)} if scored.values else {}),
    }
    inputs = AdvantageInputs(
        torch.tensor([[part.value for part in t.rewards] for t in sampled], dtype=torch.float64),
        torch.tensor(PARTS, dtype=torch.float64),
        shaping,
        _offsets(scored.lengths),
    )
    return advantage(Choice(name=case.advantage))(inputs, given)


def _actor_loss(
    scored: _Scored, actor: Any, advantages: list[Tensor], members: Sequence[int]
) -> Metrics:
    def of(column: Sequence[Tensor]) -> Tensor:
        return torch.cat([column[i] for i in members])

    case = scored.case
    pairs = [plain_logprobs(actor, scored.samples[i]) for i in members]
    logprobs, entropy = (torch.cat(column) for column in zip(*pairs, strict=True))
    old = of(scored.old) if case.mini_batches > 1 else logprobs.detach()
    sizes = [scored.lengths[i] for i in members]
    columns = {SAMPLER_LOGPROBS: of(scored.sampler)}
    inputs = PolicyLossInputs(logprobs, old, of(advantages), _offsets(sizes), columns)
    whole = PolicyObjectiveInputs(inputs, entropy)
    found = policy_loss(Choice(name=case.policy_loss))(whole)
    loss, metrics = found.loss_L, {n: x.mean() for n, x in found.metrics.items()}
    if case.correction is not None:
        logratio = CorrectionInputs(old - of(scored.sampler), _offsets(sizes))
        weights = correction(Choice(name=case.correction))(logratio).weights_L
        loss = weights * loss
        metrics["correction"] = weights.mean()
    metrics |= {"policy_loss": _aggregated(loss, sizes, case), "entropy": entropy.mean()}
    total = loss - BONUS * entropy
    if case.kl == "loss":  # k3, times the ratio
        away = of(scored.reference) - logprobs
        metrics["kl_loss"] = ((logprobs - old).exp() * (away.exp() - 1 - away)).mean()
        total = total + KL * (logprobs - old).exp() * (away.exp() - 1 - away)
    return metrics | {"loss": _aggregated(total, sizes, case)}


def _aggregated(x: Tensor, sizes: Sequence[int], case: Case) -> Tensor:
    match case.aggregation:
        case "tokens":
            return x.sum() / len(x)
        case "constant":
            return x.sum() / (len(sizes) * CONSTANT)
        case _:
            own = [part.mean() if len(part) else part.sum() for part in x.split(list(sizes))]
            return torch.stack(own).sum() / len(sizes)


def _critic_loss(
    scored: _Scored, critic: Any, returns: Sequence[Tensor], members: Sequence[int]
) -> Metrics:
    losses = []
    for i in members:
        values, old = plain_values(critic, scored.samples[i]), scored.values[i]
        near = torch.minimum(torch.maximum(values, old - CLIP_VALUE), old + CLIP_VALUE)
        both = torch.stack([(values - returns[i]) ** 2, (near - returns[i]) ** 2])
        losses.append(both.amax(0) / 2)
    return {"loss": torch.cat(losses).mean()}


def _learned(
    model: Any, loss: Callable[[Sequence[int]], Metrics], updates: Sequence[Sequence[int]]
) -> PlainRole:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0
    )
    found = []
    for members in updates:
        metrics = loss(members)
        optimizer.zero_grad()
        metrics["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
        optimizer.step()
        found.append({name: x.item() for name, x in metrics.items()} | {"grad_norm": norm.item()})
    means = {name: fmean(one[name] for one in found) for name in found[0]}
    return PlainRole(means, before, {n: p.detach().clone() for n, p in model.named_parameters()})
