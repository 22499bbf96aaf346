"""The actor's objective: a policy loss, plus the KL from the reference, minus the entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, assert_never

from torch import Tensor

from plimsoll.algorithm.inputs import (
    CorrectionInputs,
    LossOutput,
    PolicyLossInputs,
    TokenLoss,
    TokenWeights,
    token_mean,
)
from plimsoll.algorithm.ratios import KlEstimator, is_clamped, kl, mismatch_metrics, ratios
from plimsoll.algorithm.sequences import means
from plimsoll.records import REFERENCE_LOGPROBS, SAMPLER_LOGPROBS, BatchCounts

Aggregation = Literal["tokens", "sequences", "constant"]


def aggregate(
    x_L: Tensor,
    cu_loss_tokens: Tensor,
    counts: BatchCounts,
    aggregation: Aggregation,
    constant: int,
) -> Tensor:
    """Return a micro-batch's share of the step's loss: a scalar.

    Args:
        x_L: the loss of each token.
        cu_loss_tokens: int, shape [S + 1].
        counts: the counts of the whole optimizer step.
        aggregation: `tokens`: the mean over all action tokens of the step (DAPO,
            https://arxiv.org/abs/2503.14476, section 3.3). `sequences`: the mean over sequences of
            each sequence's mean over its tokens (GRPO, https://arxiv.org/abs/2402.03300).
            `constant`: the sum over tokens, divided by `constant` tokens for each sequence, so that
            length changes no token's weight (Dr. GRPO, https://arxiv.org/abs/2503.20783).
        constant: the number of tokens that each sequence counts as, if aggregation is `constant`.
    """
    match aggregation:
        case "tokens":
            return token_mean(x_L, counts)
        case "sequences":
            return means(x_L, cu_loss_tokens).sum() / counts.sequences
        case "constant":
            return x_L.sum() / (counts.sequences * constant)
        case _:
            assert_never(aggregation)


@dataclass(frozen=True)
class PolicyObjectiveInputs:
    """The inputs of the actor's objective for one micro-batch.

    Attributes:
        policy: the inputs of the policy loss. Its columns have the sampler's log-probs, and the
            reference's unless no KL is added.
        entropy_L: the entropy (nats) of the policy's distribution at each learned token; it needs a
            gradient only if there is an entropy bonus.
    """

    policy: PolicyLossInputs
    entropy_L: Tensor

    def __post_init__(self) -> None:
        assert self.entropy_L.shape == self.policy.logprobs_L.shape

    @property
    def correction(self) -> CorrectionInputs:
        """The inputs of a correction: the trainer's old log-probs minus the sampler's."""
        logratio_L = self.policy.old_logprobs_L - self.policy.columns[SAMPLER_LOGPROBS]
        return CorrectionInputs(logratio_L, self.policy.cu_loss_tokens)


@dataclass(frozen=True)
class PolicyTerms:
    """The terms of the objective; see `policy_objective`, `aggregate` and `kl`.

    If `ratio_corrected` is set, the KL estimate of each token is multiplied by its importance
    ratio, and its gradient is replaced by that of the KL itself.
    """

    aggregation: Aggregation = "tokens"
    constant: int = 1
    kl_estimator: KlEstimator = "k3"
    kl_coefficient: float = 0.0
    ratio_corrected: bool = False
    entropy_bonus: float = 0.0


def policy_objective(
    inputs: PolicyObjectiveInputs,
    counts: BatchCounts,
    terms: PolicyTerms,
    policy_loss: Callable[[PolicyObjectiveInputs], TokenLoss],
    correction: Callable[[CorrectionInputs], TokenWeights] | None = None,
) -> LossOutput:
    """Return the actor's loss, aggregated over tokens, with its metrics.

    A token's loss is weight * policy loss + kl_coefficient * KL (with a reference) - entropy_bonus
    * entropy. The weights come from the correction (None: all are 1) and touch the policy loss
    alone. `counts` are of the whole optimizer step, not of this micro-batch.

    A ratio-corrected KL has the gradient of the KL itself, also if the policy is no longer the one
    that sampled (Liu et al. 2025, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 3.1).
    With the ratio w and d = log policy - log reference, its value at a token is w times the
    estimator, and its gradient is w * d for every estimator. For k3 that is the derivative of the
    value; for k2 it is that of k2 with w held fixed. The derivative of w * k1 is w * (d + 1): the 1
    is zero in expectation, and while d is small the gradient is hardly more than its noise.

    Metrics, means over tokens: the policy loss's own; those of `mismatch_metrics`; `correction`,
    the mean weight, and `correction_zero`, the share of weights that are 0; `entropy` (nats); with
    a reference, `kl_loss` (nats, before the coefficient) and `kl_clamped`, the share of tokens
    whose log-ratio to the reference is clamped before it is exponentiated; and `policy_loss`,
    aggregated.
    """

    def total(x_L: Tensor) -> Tensor:
        policy = inputs.policy
        return aggregate(x_L, policy.cu_loss_tokens, counts, terms.aggregation, terms.constant)

    token_loss = policy_loss(inputs)
    loss_L, metrics_L = token_loss.loss_L, token_loss.metrics | mismatch_metrics(inputs.correction)
    if correction is not None:
        weights_L = correction(inputs.correction).weights_L
        loss_L = weights_L * loss_L
        metrics_L |= {"correction": weights_L, "correction_zero": (weights_L == 0).float()}
    loss = total(loss_L)
    metrics = {name: token_mean(x_L.detach(), counts) for name, x_L in metrics_L.items()}
    entropy = token_mean(inputs.entropy_L, counts)
    metrics |= {"policy_loss": loss.detach(), "entropy": entropy.detach()}
    reference_L = inputs.policy.columns.get(REFERENCE_LOGPROBS)
    if reference_L is not None:
        kl_L = _kl(inputs.policy, reference_L, terms)
        distance_L = inputs.policy.logprobs_L - reference_L
        metrics["kl_loss"] = token_mean(kl_L.detach(), counts)
        metrics["kl_clamped"] = token_mean(is_clamped(distance_L), counts)
        loss = loss + terms.kl_coefficient * total(kl_L)
    if terms.entropy_bonus > 0:  # without a bonus the head need not go back through the entropy
        loss = loss - terms.entropy_bonus * total(inputs.entropy_L)
    return LossOutput(loss=loss, metrics=metrics)


def _kl(policy: PolicyLossInputs, reference_L: Tensor, terms: PolicyTerms) -> Tensor:
    kl_L = kl(policy.logprobs_L, reference_L, terms.kl_estimator)
    if not terms.ratio_corrected:
        return kl_L
    ratio_L = ratios(policy.logprobs_L.detach() - policy.old_logprobs_L)
    learned_L = ratio_L * kl(policy.logprobs_L, reference_L, "k2")
    return learned_L + (ratio_L * kl_L - learned_L).detach()
