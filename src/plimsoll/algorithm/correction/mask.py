"""Importance weights that are 0 outside of two bounds."""

from __future__ import annotations

import torch

from plimsoll.algorithm.inputs import CorrectionInputs, TokenWeights
from plimsoll.algorithm.ratios import sampler_ratios
from plimsoll.config.base import NonNegativeFloat, PositiveFloat, RatioLevel


def weigh(
    inputs: CorrectionInputs,
    *,
    level: RatioLevel = "sequence",
    low: NonNegativeFloat = 0.0,
    high: PositiveFloat = 3.0,
    kept: RatioLevel | None = None,
) -> TokenWeights:
    """Return each token's weight, [L]: the trainer's probability divided by the sampler's.

    The weight is 0 if the ratio of `level` (see `sampler_ratios`) is below `low` or above `high`.
    Otherwise it is the ratio of the level `kept` (None: of `level`).
    """
    ratio_L = sampler_ratios(inputs, level)
    within_L = (ratio_L >= low) & (ratio_L <= high)
    weight_L = ratio_L if kept is None else sampler_ratios(inputs, kept)
    return TokenWeights(torch.where(within_L, weight_L, 0.0))
