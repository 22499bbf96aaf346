"""Weights that correct for the difference between sampler and trainer.

    correction(inputs: CorrectionInputs, *, options) -> TokenWeights

`algorithm.correction.name` chooses a function of this file by its name.
"""

from __future__ import annotations

import torch

from plimsoll.algorithm.inputs import CorrectionInputs, TokenWeights
from plimsoll.algorithm.ratios import sampler_ratios
from plimsoll.config.base import NonNegativeFloat, PositiveFloat, RatioLevel


def truncate(
    inputs: CorrectionInputs, *, level: RatioLevel = "token", high: PositiveFloat = 2.0
) -> TokenWeights:
    """Return each token's weight, [L]: the trainer's probability divided by the sampler's.

    Truncated importance weights.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training",
    https://fengyao.notion.site/off-policy-rl.

    A ratio above `high` is set to `high`. `sampler_ratios` explains `level`.
    """
    return TokenWeights(sampler_ratios(inputs, level).clamp(max=high))


def mask(
    inputs: CorrectionInputs,
    *,
    level: RatioLevel = "sequence",
    low: NonNegativeFloat = 0.0,
    high: PositiveFloat = 3.0,
    kept: RatioLevel | None = None,
) -> TokenWeights:
    """Return each token's weight, [L]: the trainer's probability divided by the sampler's.

    Importance weights that are 0 outside of two bounds.

    The weight is 0 if the ratio of `level` (see `sampler_ratios`) is below `low` or above `high`.
    Otherwise it is the ratio of the level `kept` (None: of `level`).
    """
    ratio_L = sampler_ratios(inputs, level)
    within_L = (ratio_L >= low) & (ratio_L <= high)
    weight_L = ratio_L if kept is None else sampler_ratios(inputs, kept)
    return TokenWeights(torch.where(within_L, weight_L, 0.0))


def icepop(
    inputs: CorrectionInputs, *, low: NonNegativeFloat = 0.5, high: PositiveFloat = 5.0
) -> TokenWeights:
    """Return each token's weight, [L]: the trainer's probability divided by the sampler's.

    Importance weights of tokens, set to 0 outside of a band (IcePop).

    Ling team 2025, "Small leak can sink a great ship", https://ringtech.notion.site/icepop.

    The weight is 0 if this ratio is below `low` or above `high`.
    """
    return mask(inputs, level="token", low=low, high=high)
