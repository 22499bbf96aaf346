"""Responses of one prompt beside one another, and advantages of whole responses."""

from __future__ import annotations

import torch
from torch import Tensor

from plimsoll.algorithm.inputs import AdvantageInputs
from plimsoll.algorithm.sequences import discounted_sums, sequence_of_token


def numbered(group_S: Tensor) -> tuple[Tensor, Tensor]:
    """Each sequence's group as a number from 0, shape [S], and the size of each group."""
    _, number_S, sizes = group_S.unique(return_inverse=True, return_counts=True)
    return number_S, sizes


def group_means(x_S: Tensor, group_S: Tensor) -> Tensor:
    """The mean over each sequence's group, shape [S]; of equal numbers exactly that number."""
    number_S, sizes = numbered(group_S)
    zeros = x_S.new_zeros(len(sizes))
    least = zeros.scatter_reduce(0, number_S, x_S, "amin", include_self=False)
    above = zeros.index_add(0, number_S, x_S - least[number_S])
    return (least + above / sizes)[number_S]


def group_deviations(x_S: Tensor, group_S: Tensor) -> Tensor:
    """The standard deviation over each sequence's group, with n - 1; shape [S]. 0 for a group of
    one."""
    number_S, sizes = numbered(group_S)
    squares_S = (x_S - group_means(x_S, group_S)).square()
    totals = x_S.new_zeros(len(sizes)).index_add(0, number_S, squares_S)
    return (totals / (sizes - 1).clamp(min=1)).sqrt()[number_S]


def to_tokens(inputs: AdvantageInputs, advantages_S: Tensor) -> Tensor:
    """Each token's advantage: that of its whole response, and what shapes it from there on; shape
    [L]."""
    advantages_L = advantages_S.float()[
        sequence_of_token(inputs.cu_loss_tokens, len(inputs.shaping_L))
    ]
    if not torch.any(inputs.shaping_L):
        return advantages_L
    return advantages_L + discounted_sums(inputs.shaping_L, inputs.cu_loss_tokens, 1.0)
