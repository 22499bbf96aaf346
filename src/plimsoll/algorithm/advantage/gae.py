"""Generalised advantage estimation; Schulman et al. 2016, https://arxiv.org/abs/1506.02438."""

from __future__ import annotations

import torch
from torch import Tensor

from plimsoll.algorithm.inputs import AdvantageInputs, Advantages
from plimsoll.algorithm.sequences import last_tokens, lengths, sequence_of_token
from plimsoll.config.base import Probability


def estimate(
    inputs: AdvantageInputs, *, gamma: Probability = 1.0, gae_lambda: Probability = 0.95
) -> Advantages:
    """Equation 16 of the paper, token by token:

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * gae_lambda * A_{t+1}.

    The value after a sequence's last learned token is 0: an episode ends there, whether the
    response stopped by itself or was cut. Returns are advantages + values.
    """
    values_L = inputs.values_L
    next_values_L = values_L.roll(-1)
    next_values_L[last_tokens(inputs.cu_loss_tokens)] = 0.0
    deltas_L = inputs.rewards_L + gamma * next_values_L - values_L
    advantages_L = _discounted_sums(deltas_L, inputs.cu_loss_tokens, gamma * gae_lambda)
    return Advantages(advantages_L=advantages_L, returns_L=advantages_L + values_L)


def _discounted_sums(x_L: Tensor, cu_loss_tokens: Tensor, discount: float) -> Tensor:
    """sum_k discount^k x_{t+k}, to the end of each sequence: all sequences at once.

    The sequences stand side by side as columns, padded with zeros below; going up from the
    bottom, the padding adds nothing, so a sequence begins at its own last token.
    """
    if len(x_L) == 0:
        return x_L.clone()
    sequence_L = sequence_of_token(cu_loss_tokens)
    row_L = torch.arange(len(x_L), device=x_L.device) - cu_loss_tokens[:-1][sequence_L]
    rows, columns = int(lengths(cu_loss_tokens).max()), len(cu_loss_tokens) - 1
    sums = x_L.new_zeros(rows, columns)
    sums[row_L, sequence_L] = x_L
    for row in reversed(range(rows - 1)):
        sums[row] += discount * sums[row + 1]
    return sums[row_L, sequence_L]
