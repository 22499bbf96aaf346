"""Truncated importance weights.

Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training",
https://fengyao.notion.site/off-policy-rl.
"""

from __future__ import annotations

from plimsoll.algorithm.inputs import CorrectionInputs, TokenWeights
from plimsoll.algorithm.ratios import sampler_ratios
from plimsoll.config.base import PositiveFloat, RatioLevel


def weigh(
    inputs: CorrectionInputs, *, level: RatioLevel = "token", high: PositiveFloat = 2.0
) -> TokenWeights:
    """Return each token's weight, [L]: the trainer's probability divided by the sampler's.

    A ratio above `high` is set to `high`. `sampler_ratios` explains `level`.
    """
    return TokenWeights(sampler_ratios(inputs, level).clamp(max=high))
