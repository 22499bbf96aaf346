"""The loss of packs of sampled responses under an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from plimsoll.algorithm.choice import policy_loss
from plimsoll.algorithm.inputs import LossOutput, PolicyLossInputs
from plimsoll.algorithm.policy_objective import PolicyObjectiveInputs, policy_objective
from plimsoll.config.base import Choice
from plimsoll.engine.protocol import Engine
from plimsoll.engine.streams import PolicyStream
from plimsoll.model.policy import PackTensors
from plimsoll.records import BatchCounts, Floats, Pack


@dataclass(frozen=True)
class PolicyObjective:
    """The policy's loss with everything but the batch: crosses to the ranks with every step."""

    loss: Choice
    kl_estimator: Literal["k1", "k2", "k3"]
    kl_coefficient: float
    entropy_bonus: float


def policy_losses(
    engine: Engine,
    packs: Sequence[Pack],
    streams: Sequence[PolicyStream],
    counts: BatchCounts,
    objective: PolicyObjective,
    device: torch.device,
) -> Iterator[LossOutput]:
    """The loss of each pack, one forward at a time; counts: of the whole step."""
    loss = policy_loss(objective.loss)
    for pack, stream in zip(packs, streams, strict=True):
        tensors = PackTensors.from_pack(pack, device)
        logprobs_L, entropy_L = engine.forward(tensors, True)
        yield policy_objective(
            _inputs(tensors, stream, logprobs_L, entropy_L, counts),
            loss,
            objective.kl_estimator,
            objective.kl_coefficient,
            objective.entropy_bonus,
        )


def _inputs(
    tensors: PackTensors,
    stream: PolicyStream,
    logprobs_L: Tensor,
    entropy_L: Tensor,
    counts: BatchCounts,
) -> PolicyObjectiveInputs:
    device = logprobs_L.device
    old_L, reference_L = stream.old_logprobs_L, stream.reference_logprobs_L
    policy = PolicyLossInputs(
        logprobs_L=logprobs_L,
        old_logprobs_L=logprobs_L.detach() if old_L is None else _tensor(old_L, device),
        advantages_L=_tensor(stream.advantages_L, device),
        cu_learned=tensors.cu_learned,
        counts=counts,
    )
    reference = None if reference_L is None else _tensor(reference_L, device)
    return PolicyObjectiveInputs(policy, entropy_L, reference)


def _tensor(array: Floats, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
