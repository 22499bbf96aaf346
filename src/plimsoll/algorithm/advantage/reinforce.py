"""The return itself, without a baseline; Williams 1992, https://doi.org/10.1007/BF00992696."""

from __future__ import annotations

from plimsoll.algorithm.inputs import AdvantageInputs, Advantages
from plimsoll.algorithm.sequences import discounted_sums
from plimsoll.config.base import Probability


def estimate(inputs: AdvantageInputs, *, gamma: Probability = 1.0) -> Advantages:
    """Return A_t = sum_k gamma^k r_{t+k} at each token t; the sum goes to the response's end."""
    return Advantages(discounted_sums(inputs.rewards_L, inputs.cu_loss_tokens, gamma))
