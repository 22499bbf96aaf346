"""Clipped importance weights on a plain policy gradient (CISPO).

MiniMax 2025, https://arxiv.org/abs/2506.13585, section 3.1.
"""

from __future__ import annotations

from plimsoll.algorithm.inputs import PolicyLossInputs, TokenLoss
from plimsoll.algorithm.ratios import ratio_metrics, ratios
from plimsoll.config.base import NonNegativeFloat, PositiveFloat, Probability


def loss(
    inputs: PolicyLossInputs,
    *,
    clip_low: Probability = 0.2,
    clip_high: NonNegativeFloat = 0.2,
    cap: PositiveFloat | None = None,
) -> TokenLoss:
    """Return -w * A * log-prob of each token, where w is its clipped ratio, without a gradient.

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
