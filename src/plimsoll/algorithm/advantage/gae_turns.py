"""Generalised advantage estimation over turns: a turn of an episode is one action.

Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16, with turns in place of tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plimsoll.algorithm.advantage import gae
from plimsoll.algorithm.inputs import AdvantageInputs, Advantages
from plimsoll.algorithm.sequences import sequence_of_token, sums
from plimsoll.algorithm.sequences import whiten as whitened
from plimsoll.config.base import Probability


def estimate(
    inputs: AdvantageInputs,
    values_L: Tensor,
    turn_L: Tensor,
    *,
    gamma: Probability = 1.0,
    gae_lambda: Probability = 0.95,
    whiten: bool = True,
) -> Advantages:
    """Return advantages of turns, at each token of a turn.

    With V_k the value at the first token of turn k, and r_k the sum of its tokens' rewards:

    delta_k = r_k + gamma * V_{k+1} - V_k;  A_k = delta_k + gamma * gae_lambda * A_{k+1}.

    Each token of turn k has the advantage A_k, and the return A_k + V_k. The value after an
    episode's last turn is 0. So both discounts count turns, however long they are. `turn_L` is the
    number of each token's turn in its episode; `whiten` works as in gae.py.
    """
    sequence_L = sequence_of_token(inputs.cu_loss_tokens, len(values_L))
    first_L = torch.ones_like(turn_L, dtype=torch.bool)
    first_L[1:] = (turn_L.diff() != 0) | (sequence_L.diff() != 0)
    starts_K = first_L.nonzero()[:, 0]
    cu_tokens = torch.cat([starts_K, starts_K.new_tensor([len(values_L)])])  # of turns, [K + 1]
    turns_S = torch.bincount(sequence_L[starts_K], minlength=len(inputs.cu_loss_tokens) - 1)
    cu_turns = torch.cat([turns_S.new_zeros(1), turns_S.cumsum(0)])  # of sequences, [S + 1]
    turns = replace(
        inputs,
        parts_SR=torch.zeros_like(inputs.parts_SR),  # they are in the sums already
        shaping_L=sums(inputs.rewards_L, cu_tokens),
        cu_loss_tokens=cu_turns,
        placed_L=None,
    )
    values_K, turn_of_L = values_L[starts_K], first_L.cumsum(0) - 1
    by_turn = gae.estimate(turns, values_K, gamma=gamma, gae_lambda=gae_lambda, whiten=False)
    advantages_L = by_turn.advantages_L[turn_of_L]
    returns_L = (by_turn.advantages_L + values_K)[turn_of_L]
    return Advantages(whitened(advantages_L) if whiten else advantages_L, returns_L)
