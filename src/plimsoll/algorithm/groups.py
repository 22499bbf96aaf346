"""Compare responses to the same prompt, and spread advantages of responses over their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from plimsoll.algorithm.inputs import AdvantageInputs
from plimsoll.algorithm.sequences import discounted_sums, sequence_of_token


def number_groups(group_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sequence's group as a number from 0, shape [S], and the size of each group."""
    _, number_S, sizes = group_S.unique(return_inverse=True, return_counts=True)
    return number_S, sizes


def group_means(x_S: Tensor, group_S: Tensor) -> Tensor:
    """Return the mean over each sequence's group, shape [S]; exact for equal numbers."""
    number_S, sizes = number_groups(group_S)
    zeros = x_S.new_zeros(len(sizes))
    least = zeros.scatter_reduce(0, number_S, x_S, "amin", include_self=False)
    above = zeros.index_add(0, number_S, x_S - least[number_S])
    return (least + above / sizes)[number_S]


def group_deviations(x_S: Tensor, group_S: Tensor) -> Tensor:
    """Return the standard deviation (n - 1) over each sequence's group, shape [S].

    A group of one has 0.
    """
    number_S, sizes = number_groups(group_S)
    squares_S = (x_S - group_means(x_S, group_S)).square()
    totals = x_S.new_zeros(len(sizes)).index_add(0, number_S, squares_S)
    return (totals / (sizes - 1).clamp(min=1)).sqrt()[number_S]


def to_tokens(inputs: AdvantageInputs, advantages_S: Tensor) -> Tensor:
    """Return each token's advantage, shape [L]: its response's, plus the shaping from there on."""
    advantages_L = advantages_S.float()[
        sequence_of_token(inputs.cu_loss_tokens, len(inputs.shaping_L))
    ]
    if not torch.any(inputs.shaping_L):
        return advantages_L
    return advantages_L + discounted_sums(inputs.shaping_L, inputs.cu_loss_tokens, 1.0)
