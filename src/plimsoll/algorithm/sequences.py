"""Compute sums, means and positions of the sequences in a flat `_L` tensor.

Sequence s begins at `cu_loss_tokens[s]`; this tensor has shape [S + 1].
"""

from __future__ import annotations

import torch
from torch import Tensor


def last_tokens(cu_loss_tokens: Tensor) -> Tensor:
    """Return the position in `_L` of each non-empty sequence's last token; int."""
    return cu_loss_tokens[1:][cu_loss_tokens.diff() > 0].long() - 1


def sequence_of_token(cu_loss_tokens: Tensor, tokens: int) -> Tensor:
    """Return the number of the sequence that each token belongs to; int, shape [L].

    `tokens` is L. It is a parameter, so that the host does not wait for the device to compute it.
    """
    lengths_S = cu_loss_tokens.diff()
    numbers_S = torch.arange(len(lengths_S), device=cu_loss_tokens.device)
    return numbers_S.repeat_interleave(lengths_S, output_size=tokens)


def sums(x_L: Tensor, cu_loss_tokens: Tensor) -> Tensor:
    """Return the sum over each sequence's learned tokens, shape [S]; 0 for an empty sequence."""
    sizes = cu_loss_tokens.diff().long()
    # Unsafe: a check of the sizes would make the host wait for the device.
    return torch.segment_reduce(x_L, "sum", lengths=sizes, initial=0, unsafe=True)


def means(x_L: Tensor, cu_loss_tokens: Tensor) -> Tensor:
    """Return the mean over each sequence's learned tokens, shape [S]; 0 for an empty sequence."""
    return sums(x_L, cu_loss_tokens) / cu_loss_tokens.diff().clamp(min=1)


def discounted_sums(x_L: Tensor, cu_loss_tokens: Tensor, discount: float) -> Tensor:
    """Return at each token t the sum_k discount^k x_{t+k} to the end of its sequence, shape [L].

    All sequences are computed at once, as columns of a table that is padded with zeros below. Sums
    go from the bottom up, so the padding adds nothing.
    """
    if len(x_L) == 0:
        return x_L.clone()
    sequence_L = sequence_of_token(cu_loss_tokens, len(x_L))
    row_L = torch.arange(len(x_L), device=x_L.device) - cu_loss_tokens[:-1][sequence_L]
    rows, columns = int(cu_loss_tokens.diff().max()), len(cu_loss_tokens) - 1
    sums = x_L.new_zeros(rows, columns)
    sums[row_L, sequence_L] = x_L
    for row in reversed(range(rows - 1)):
        sums[row] += discount * sums[row + 1]
    return sums[row_L, sequence_L]


_EPS = 1e-8


def whiten(values_L: Tensor) -> Tensor:
    """Return (x - mean) / sqrt(variance + 1e-8), with the population's variance (divided by L).

    If all values are equal, or there is only one, the result is 0.
    """
    if len(values_L) == 0:
        return values_L.clone()
    variance, mean = torch.var_mean(values_L, correction=0)
    return (values_L - mean) * torch.rsqrt(variance + _EPS)


def token_rewards(scores_S: Tensor, shaping_L: Tensor, cu_loss_tokens: Tensor) -> Tensor:
    """Return the rewards of the learned tokens, [L]: shaping, plus the score at the last token.

    The score of a sequence without learned tokens is dropped.
    """
    assert cu_loss_tokens.shape == (len(scores_S) + 1,)
    rewards_L = shaping_L.clone()
    rewards_L[last_tokens(cu_loss_tokens)] += scores_S[cu_loss_tokens.diff() > 0]
    return rewards_L
