"""What the actor minimises: a policy loss, plus the KL from the reference, minus the entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from plimsoll.algorithm.inputs import LossOutput, PolicyLossInputs, token_mean
from plimsoll.algorithm.kl import KlEstimator, kl


@dataclass(frozen=True)
class PolicyObjectiveInputs:
    """One micro-batch of the actor.

    entropy_L: the entropy (nats) of the policy's distribution at each learned token; needs a
        gradient only when there is an entropy bonus.
    reference_logprobs_L: the reference's log-probs of the sampled tokens; None: no KL is added.
    """

    policy: PolicyLossInputs
    entropy_L: Tensor
    reference_logprobs_L: Tensor | None

    def __post_init__(self) -> None:
        assert self.entropy_L.shape == self.policy.logprobs_L.shape
        reference_L = self.reference_logprobs_L
        assert reference_L is None or reference_L.shape == self.policy.logprobs_L.shape


def policy_objective(
    inputs: PolicyObjectiveInputs,
    policy_loss: Callable[[PolicyLossInputs], LossOutput],
    kl_estimator: KlEstimator,
    kl_coefficient: float,
    entropy_bonus: float,
) -> LossOutput:
    """policy loss + kl_coefficient * mean KL (with a reference) - entropy_bonus * mean entropy.

    Metrics: the policy loss's own, and `policy_loss`, `entropy` (mean, nats per token) and, with
    a reference, `kl_loss` (mean KL, nats per token, before the coefficient).
    """
    counts = inputs.policy.counts
    policy = policy_loss(inputs.policy)
    entropy = token_mean(inputs.entropy_L, counts)
    loss = policy.loss
    metrics = policy.metrics | {"policy_loss": policy.loss.detach(), "entropy": entropy.detach()}
    if inputs.reference_logprobs_L is not None:
        kl_L = kl(inputs.policy.logprobs_L, inputs.reference_logprobs_L, kl_estimator)
        kl_loss = token_mean(kl_L, counts)
        loss = loss + kl_coefficient * kl_loss
        metrics["kl_loss"] = kl_loss.detach()
    if entropy_bonus > 0:  # without a bonus the head need not go back through the entropy
        loss = loss - entropy_bonus * entropy
    return LossOutput(loss=loss, metrics=metrics)
