"""Mask tokens by how far their probability has moved from the sampler's (DPPO, total variation).

Qi et al. 2026, https://arxiv.org/abs/2602.04879, with the form that prime-rl trains with.
"""

from __future__ import annotations

import math

from torch import Tensor

from plimsoll.algorithm.inputs import PolicyLossInputs, TokenLoss
from plimsoll.algorithm.ratios import ratio_metrics, ratios
from plimsoll.config.base import NonNegativeFloat, PositiveFloat, Probability


def loss(
    inputs: PolicyLossInputs,
    sampler_logprobs_L: Tensor,
    *,
    threshold: Probability = 0.2,
    threshold_low: Probability | None = None,
    cap: PositiveFloat | None = None,
    penalty: NonNegativeFloat = 1e-3,
) -> TokenLoss:
    """Return -A * ratio + penalty * (log ratio)^2 of each token.

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
