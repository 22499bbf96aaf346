"""PPO's clipped policy loss, with dual clip.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347; Ye et al. 2020 (dual clip),
https://arxiv.org/abs/1912.09729; a higher upper bound: Yu et al. 2025 (DAPO),
https://arxiv.org/abs/2503.14476.
"""

from __future__ import annotations

import torch

from plimsoll.algorithm.inputs import PolicyLossInputs, TokenLoss
from plimsoll.algorithm.ratios import ratio_metrics, ratios
from plimsoll.config.base import NonNegativeFloat, OverOne, Probability


def loss(
    inputs: PolicyLossInputs,
    *,
    clip_low: Probability = 0.2,
    clip_high: NonNegativeFloat = 0.2,
    dual_clip: OverOne | None = None,
) -> TokenLoss:
    """Return PPO's -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) of each token.

    It is equation 7 of PPO; the ratio is the new probability of a token over the old one.
    `dual_clip` is a number c > 1: where A < 0 the term is at least c * A (dual clip, equation 5),
    so that a token that became much likelier cannot dominate the batch. Metrics: `clip_fraction`,
    the share of tokens whose clip is active, so that no gradient flows, and those of
    `ratio_metrics`.
    """
    advantages_L = inputs.advantages_L
    logratio_L = inputs.logprobs_L - inputs.old_logprobs_L
    ratio_L = ratios(logratio_L)
    unclipped_L = ratio_L * advantages_L
    clipped_L = ratio_L.clamp(1 - clip_low, 1 + clip_high) * advantages_L
    objective_L = torch.minimum(unclipped_L, clipped_L)
    if dual_clip is not None:
        bounded_L = torch.maximum(objective_L, dual_clip * advantages_L)
        objective_L = torch.where(advantages_L < 0, bounded_L, objective_L)
    clipped = {"clip_fraction": (objective_L != unclipped_L).float()}
    return TokenLoss(-objective_L, clipped | ratio_metrics(inputs, logratio_L))
