"""Importance weights of tokens, set to 0 outside of a band (IcePop).

Ling team 2025, "Small leak can sink a great ship", https://ringtech.notion.site/icepop.
"""

from __future__ import annotations

from plimsoll.algorithm.correction import mask
from plimsoll.algorithm.inputs import CorrectionInputs, TokenWeights
from plimsoll.config.base import NonNegativeFloat, PositiveFloat


def weigh(
    inputs: CorrectionInputs, *, low: NonNegativeFloat = 0.5, high: PositiveFloat = 5.0
) -> TokenWeights:
    """Return each token's weight, [L]: the trainer's probability divided by the sampler's.

    The weight is 0 if this ratio is below `low` or above `high`.
    """
    return mask.weigh(inputs, level="token", low=low, high=high)
