"""Policy losses: `algorithm.policy_loss.name` chooses a function of this file by its name.

loss(inputs: PolicyLossInputs, *, options) -> TokenLoss
loss(inputs: PolicyLossInputs, sampler_logprobs_L: Tensor, *, options) -> TokenLoss

A loss gives a number for each token. `aggregate` (policy_objective.py) adds them up and divides by
the counts of the optimizer step, as `algorithm.aggregation` says.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plimsoll.algorithm.inputs import PolicyLossInputs, TokenLoss
from plimsoll.algorithm.ratios import ratio_metrics, ratios
from plimsoll.algorithm.sequences import means, sequence_of_token
from plimsoll.config.base import NonNegativeFloat, OverOne, PositiveFloat, Probability


def reinforce(inputs: PolicyLossInputs) -> TokenLoss:
    """Return -A * log-prob of each token.

    The plain policy gradient; Williams 1992, https://doi.org/10.1007/BF00992696.

    The loss does not compare with the old policy, so a step should have a single update.
    """
    return TokenLoss(-inputs.advantages_L * inputs.logprobs_L, {})


def clip(
    inputs: PolicyLossInputs,
    *,
    clip_low: Probability = 0.2,
    clip_high: NonNegativeFloat = 0.2,
    dual_clip: OverOne | None = None,
) -> TokenLoss:
    """Return -min(ratio * A, clamped ratio * A) of each token, PPO's clipped policy loss.

    The clamped ratio lies within 1 - clip_low and 1 + clip_high.

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; Ye et al. 2020 (dual clip),
    https://arxiv.org/abs/1912.09729; a higher upper bound: Yu et al. 2025 (DAPO),
    https://arxiv.org/abs/2503.14476.

    It is equation 7 of PPO; the ratio is the new probability of a token over the old one.
    `dual_clip` is a number c > 1: where A < 0 the term is at least c * A (dual clip, equation 5),
    so that a token that became much likelier cannot dominate the batch. Metrics: `clip_fraction`,
    the share of tokens whose clip is active, so that no gradient flows, and those of
    `ratio_metrics`.
    """
    logratio_L = inputs.logprobs_L - inputs.old_logprobs_L
    return _clipped(inputs, logratio_L, clip_low, clip_high, dual_clip)


def _clipped(
    inputs: PolicyLossInputs,
    logratio_L: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    advantages_L, ratio_L = inputs.advantages_L, ratios(logratio_L)
    unclipped_L = ratio_L * advantages_L
    clipped_L = ratio_L.clamp(1 - clip_low, 1 + clip_high) * advantages_L
    objective_L = torch.minimum(unclipped_L, clipped_L)
    if dual_clip is not None:
        bounded_L = torch.maximum(objective_L, dual_clip * advantages_L)
        objective_L = torch.where(advantages_L < 0, bounded_L, objective_L)
    clipped = {"clip_fraction": (objective_L != unclipped_L).float()}
    return TokenLoss(-objective_L, clipped | ratio_metrics(inputs, logratio_L))


def cispo(
    inputs: PolicyLossInputs,
    *,
    clip_low: Probability = 0.2,
    clip_high: NonNegativeFloat = 0.2,
    cap: PositiveFloat | None = None,
) -> TokenLoss:
    """Return -w * A * log-prob of each token, where w is its clipped ratio, without a gradient.

    Clipped importance weights on a plain policy gradient (CISPO).

    MiniMax 2025, https://arxiv.org/abs/2506.13585, section 3.1.

    So every token keeps a gradient, unlike with other clips. w lies within 1 - clip_low and 1 +
    clip_high, or with `cap` (5 is usual) within 0 and the cap. Metrics: `clip_fraction`, the share
    of tokens whose ratio is clipped, and those of `ratio_metrics`.
    """
    logratio_L = inputs.logprobs_L.detach() - inputs.old_logprobs_L
    ratio_L = ratios(logratio_L)
    low, high = (0.0, cap) if cap is not None else (1 - clip_low, 1 + clip_high)
    weight_L = ratio_L.clamp(low, high)
    clipped = {"clip_fraction": (weight_L != ratio_L).float()}
    loss_L = -weight_L * inputs.advantages_L * inputs.logprobs_L
    return TokenLoss(loss_L, clipped | ratio_metrics(inputs, logratio_L))


def gspo(
    inputs: PolicyLossInputs, *, clip_low: Probability = 3e-4, clip_high: NonNegativeFloat = 4e-4
) -> TokenLoss:
    """Return -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A) at each token (equation 5).

    Clipped ratios of whole sequences (GSPO); Zheng et al. 2025,
    https://arxiv.org/abs/2507.18071.

    s is the geometric mean of the ratios of the token's sequence (equation 7). The paper takes the
    mean over sequences: `algorithm.aggregation: sequences`. Metrics: `clip_fraction`, the share of
    tokens in clipped sequences, and those of `ratio_metrics`.
    """
    mean_S = means(inputs.logprobs_L - inputs.old_logprobs_L, inputs.cu_loss_tokens)
    logratio_L = mean_S[sequence_of_token(inputs.cu_loss_tokens, len(inputs.logprobs_L))]
    return _clipped(inputs, logratio_L, clip_low, clip_high)


def sapo(
    inputs: PolicyLossInputs,
    *,
    tau_positive: PositiveFloat = 1.0,
    tau_negative: PositiveFloat = 1.05,
) -> TokenLoss:
    """Return -(4 / tau) * sigmoid(tau * (ratio - 1)) * A of each token.

    A soft gate instead of a clip (SAPO); Gao et al. 2025, https://arxiv.org/abs/2511.20347.

    tau is tau_positive where A >= 0 and tau_negative elsewhere. Near a ratio of 1 the loss has the
    gradient of ratio * A, and far from it hardly any. Metrics: those of `ratio_metrics`.
    """
    logratio_L = inputs.logprobs_L - inputs.old_logprobs_L
    ratio_L = ratios(logratio_L)
    tau_L = torch.where(inputs.advantages_L >= 0, tau_positive, tau_negative)
    gate_L = torch.sigmoid(tau_L * (ratio_L - 1)) * 4 / tau_L
    return TokenLoss(-gate_L * inputs.advantages_L, ratio_metrics(inputs, logratio_L))


def dppo_tv(
    inputs: PolicyLossInputs,
    sampler_logprobs_L: Tensor,
    *,
    threshold: Probability = 0.2,
    threshold_low: Probability | None = None,
    cap: PositiveFloat | None = None,
    penalty: NonNegativeFloat = 1e-3,
) -> TokenLoss:
    """Return -A * ratio + penalty * (log ratio)^2 of each token.

    Mask tokens by how far their probability has moved from the sampler's (DPPO, total
    variation).

    Qi et al. 2026, https://arxiv.org/abs/2602.04879, with the form that prime-rl trains with.

    The ratio is the probability under the policy that learns over the sampler's. The first term is
    left out if the probability has moved from the sampler's by more than a threshold, in the
    direction in which A would move it on. The loss takes the sampler's log-probs itself, so no
    correction goes with it. Metrics: `clip_fraction`, the share of tokens left out, and those of
    `ratio_metrics`.

    Args:
        inputs: one micro-batch.
        sampler_logprobs_L: the sampler's log-probs of the sampled tokens.
        threshold: how far the probability of a token may rise; and fall, without threshold_low.
        threshold_low: how far it may fall.
        cap: the largest weight of a token: the gradient of the first term is -A * min(ratio, cap) *
            grad log-prob (section 5.4). None: the ratio itself.
        penalty: the factor of the squared log-ratio.
    """
    low = threshold if threshold_low is None else threshold_low
    logratio_L = inputs.logprobs_L - sampler_logprobs_L
    moved_L = (inputs.logprobs_L.exp() - sampler_logprobs_L.exp()).detach()
    up_L = inputs.advantages_L > 0
    left_out_L = (up_L & (moved_L > threshold)) | (~up_L & (moved_L < -low))
    kept_L = (~left_out_L).float()
    largest = math.inf if cap is None else math.log(cap)
    exponent_L = logratio_L - (logratio_L.detach() - largest).clamp(min=0)
    loss_L = -kept_L * inputs.advantages_L * ratios(exponent_L) + penalty * logratio_L.square()
    return TokenLoss(
        loss_L, {"clip_fraction": left_out_L.float()} | ratio_metrics(inputs, exponent_L)
    )
