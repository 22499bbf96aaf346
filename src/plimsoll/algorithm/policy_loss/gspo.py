"""Clipped ratios of whole sequences (GSPO); Zheng et al. 2025, https://arxiv.org/abs/2507.18071."""

from __future__ import annotations

import torch

from plimsoll.algorithm.inputs import PolicyLossInputs, TokenLoss
from plimsoll.algorithm.ratios import ratio_metrics, ratios
from plimsoll.algorithm.sequences import means, sequence_of_token
from plimsoll.config.base import NonNegativeFloat, Probability


def loss(
    inputs: PolicyLossInputs, *, clip_low: Probability = 3e-4, clip_high: NonNegativeFloat = 4e-4
) -> TokenLoss:
    """Return -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A) at each token (equation 5).

    s is the geometric mean of the ratios of the token's sequence (equation 7). The paper takes the
    mean over sequences: `algorithm.aggregation: sequences`. Metrics: `clip_fraction`, the share of
    tokens in clipped sequences, and those of `ratio_metrics`.
    """
    mean_S = means(inputs.logprobs_L - inputs.old_logprobs_L, inputs.cu_loss_tokens)
    logratio_L = mean_S[sequence_of_token(inputs.cu_loss_tokens, len(inputs.logprobs_L))]
    ratio_L = ratios(logratio_L)
    unclipped_L = ratio_L * inputs.advantages_L
    clipped_L = ratio_L.clamp(1 - clip_low, 1 + clip_high) * inputs.advantages_L
    objective_L = torch.minimum(unclipped_L, clipped_L)
    clipped = {"clip_fraction": (objective_L != unclipped_L).float()}
    return TokenLoss(-objective_L, clipped | ratio_metrics(inputs, logratio_L))
