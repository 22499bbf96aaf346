"""A band for the weight of each token (IcePop); Ling team 2025, "Small leak can sink a great ship",
https://ringtech.notion.site/icepop."""

from __future__ import annotations

from plimsoll.algorithm.correction import mask
from plimsoll.algorithm.inputs import CorrectionInputs, TokenWeights
from plimsoll.config.base import NonNegativeFloat, PositiveFloat


def weigh(
    inputs: CorrectionInputs, *, low: NonNegativeFloat = 0.5, high: PositiveFloat = 5.0
) -> TokenWeights:
    """The weight of each token, shape [L]: the trainer's probability over the sampler's where it is
    within the band, else 0."""
    return mask.weigh(inputs, level="token", low=low, high=high)
