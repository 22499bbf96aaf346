"""REINFORCE++; Hu et al. 2025, https://arxiv.org/abs/2501.03262."""

from __future__ import annotations

from plimsoll.algorithm.inputs import AdvantageInputs, Advantages
from plimsoll.algorithm.sequences import discounted_sums, whiten
from plimsoll.config.base import Probability


def estimate(inputs: AdvantageInputs, *, gamma: Probability = 1.0) -> Advantages:
    """Return each token's A: its discounted return, whitened over all learned tokens of the batch.

    See `whiten`.
    """
    returns_L = discounted_sums(inputs.rewards_L, inputs.cu_loss_tokens, gamma)
    return Advantages(whiten(returns_L))
