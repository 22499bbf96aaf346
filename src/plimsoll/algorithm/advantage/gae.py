"""Generalised advantage estimation; Schulman et al. 2016, https://arxiv.org/abs/1506.02438."""

from __future__ import annotations

from torch import Tensor

from plimsoll.algorithm.inputs import AdvantageInputs, Advantages
from plimsoll.algorithm.sequences import discounted_sums, last_tokens
from plimsoll.algorithm.sequences import whiten as whitened
from plimsoll.config.base import Probability


def estimate(
    inputs: AdvantageInputs,
    values_L: Tensor,
    *,
    gamma: Probability = 1.0,
    gae_lambda: Probability = 0.95,
    whiten: bool = True,
) -> Advantages:
    """Return advantages by equation 16 of the paper, token by token.

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * gae_lambda * A_{t+1}.

    The value after a sequence's last learned token is 0: an episode ends there, whether the
    response stopped by itself or was cut. Returns are advantages + values, before whitening.
    `whiten` shifts and scales the batch's advantages to mean 0 and standard deviation 1.
    """
    next_values_L = values_L.roll(-1)
    next_values_L[last_tokens(inputs.cu_loss_tokens)] = 0.0
    deltas_L = inputs.rewards_L + gamma * next_values_L - values_L
    advantages_L = discounted_sums(deltas_L, inputs.cu_loss_tokens, gamma * gae_lambda)
    returns_L = advantages_L + values_L
    return Advantages(whitened(advantages_L) if whiten else advantages_L, returns_L)
