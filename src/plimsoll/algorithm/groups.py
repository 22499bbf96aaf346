"""Compare responses to the same prompt, and give each token the advantage of its response."""

from __future__ import annotations

import torch
from torch import Tensor

from plimsoll.algorithm.inputs import AdvantageInputs
from plimsoll.algorithm.sequences import discounted_sums, sequence_of_token


def number_groups(group_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number, from 0, of each sequence's group, [S], and the sizes of the groups."""
    _, number_S, sizes = group_S.unique(return_inverse=True, return_counts=True)
    return number_S, sizes


def group_means(x_S: Tensor, group_S: Tensor) -> Tensor:
    """Return for each sequence the mean over its group, shape [S]; exact if all are equal."""
    number_S, sizes = number_groups(group_S)
    zeros = x_S.new_zeros(len(sizes))
    least = zeros.scatter_reduce(0, number_S, x_S, "amin", include_self=False)
    above = zeros.index_add(0, number_S, x_S - least[number_S])
    return (least + above / sizes)[number_S]


def group_deviations(x_S: Tensor, group_S: Tensor) -> Tensor:
    """Return for each sequence the standard deviation (n - 1) over its group, shape [S].

    It is 0 in a group with a single sequence.
    """
    number_S, sizes = number_groups(group_S)
    squares_S = (x_S - group_means(x_S, group_S)).square()
    totals = x_S.new_zeros(len(sizes)).index_add(0, number_S, squares_S)
    return (totals / (sizes - 1).clamp(min=1)).sqrt()[number_S]


def to_tokens(inputs: AdvantageInputs, advantages_S: Tensor) -> Tensor:
    """Return each token's advantage, [L]: its response's, plus the shaping from the token on."""
    advantages_L = advantages_S.float()[
        sequence_of_token(inputs.cu_loss_tokens, len(inputs.shaping_L))
    ]
    if not torch.any(inputs.shaping_L):
        return advantages_L
    return advantages_L + discounted_sums(inputs.shaping_L, inputs.cu_loss_tokens, 1.0)
