"""A band for the weight of each token (IcePop).

Ling team 2025, "Small leak can sink a great ship", https://ringtech.notion.site/icepop.
"""

from __future__ import annotations

from plimsoll.algorithm.correction import mask
from plimsoll.algorithm.inputs import CorrectionInputs, TokenWeights
from plimsoll.config.base import NonNegativeFloat, PositiveFloat


def weigh(
    inputs: CorrectionInputs, *, low: NonNegativeFloat = 0.5, high: PositiveFloat = 5.0
) -> TokenWeights:
    """Return the trainer's probability over the sampler's within the band, else 0; shape [L]."""
    return mask.weigh(inputs, level="token", low=low, high=high)
