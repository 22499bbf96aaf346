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
    """Return the trainer's probability over the sampler's between two bounds, else 0; shape [L].

    The ratio of `level` (see `sampler_ratios`) is compared with the bounds, and the ratio of `kept`
    is returned; None: of `level` too.
    """
    ratio_L = sampler_ratios(inputs, level)
    within_L = (ratio_L >= low) & (ratio_L <= high)
    weight_L = ratio_L if kept is None else sampler_ratios(inputs, kept)
    return TokenWeights(torch.where(within_L, weight_L, 0.0))
