"""The policy's objective on sampled responses: a policy loss, the KL and an entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from plimsoll.algorithm.choice import correction, policy_loss
from plimsoll.algorithm.inputs import LossOutput, PolicyLossInputs
from plimsoll.algorithm.kl import KlEstimator
from plimsoll.algorithm.policy_objective import (
    Aggregation,
    PolicyObjectiveInputs,
    PolicyTerms,
    policy_objective,
)
from plimsoll.config.base import Choice
from plimsoll.engine.protocol import Engine
from plimsoll.model.attention import sent
from plimsoll.model.policy import PackTensors
from plimsoll.records import BatchCounts, Floats


@dataclass(frozen=True)
class PolicyStream:
    """One number per learned token, in packed order. old_logprobs_L is None in strictly on-policy
    steps, where the old policy is the one that is being differentiated; reference_logprobs_L is
    None without a KL loss.
    """

    advantages_L: Floats
    sampler_logprobs_L: Floats
    old_logprobs_L: Floats | None
    reference_logprobs_L: Floats | None


@dataclass(frozen=True)
class PolicyObjective:
    """The policy's loss with everything but the batch; see `PolicyTerms`."""

    policy_loss: Choice
    correction: Choice | None = None
    aggregation: Aggregation = "tokens"
    constant: int = 1
    kl_estimator: KlEstimator = "k3"
    kl_coefficient: float = 0.0
    ratio_corrected: bool = False
    entropy_bonus: float = 0.0

    def loss(
        self, engine: Engine, pack: PackTensors, stream: PolicyStream, counts: BatchCounts
    ) -> LossOutput:
        logprobs_L, entropy_L = engine.forward(
            pack, entropy="loss" if self.entropy_bonus > 0 else "metric"
        )
        return policy_objective(_inputs(pack, stream, logprobs_L, entropy_L), counts, self._terms)

    @cached_property
    def _terms(self) -> PolicyTerms:
        return PolicyTerms(
            policy_loss(self.policy_loss),
            None if self.correction is None else correction(self.correction),
            self.aggregation,
            self.constant,
            self.kl_estimator,
            self.kl_coefficient,
            self.ratio_corrected,
            self.entropy_bonus,
        )


def _inputs(
    pack: PackTensors, stream: PolicyStream, logprobs_L: Tensor, entropy_L: Tensor
) -> PolicyObjectiveInputs:
    old_L, reference_L = stream.old_logprobs_L, stream.reference_logprobs_L
    device = logprobs_L.device
    policy = PolicyLossInputs(
        logprobs_L=logprobs_L,
        old_logprobs_L=logprobs_L.detach() if old_L is None else sent(old_L, device),
        advantages_L=sent(stream.advantages_L, device),
        cu_loss_tokens=pack.cu_loss_tokens,
    )
    reference = None if reference_L is None else sent(reference_L, device)
    return PolicyObjectiveInputs(
        policy, sent(stream.sampler_logprobs_L, device), entropy_L, reference
    )
