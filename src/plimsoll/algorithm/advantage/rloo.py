"""Leave one out (RLOO); Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 2.4."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plimsoll.algorithm.groups import group_means, number_groups, to_tokens
from plimsoll.algorithm.inputs import AdvantageInputs, Advantages
from plimsoll.algorithm.sequences import sums


def estimate(inputs: AdvantageInputs, group_S: Tensor, *, whole: bool = False) -> Advantages:
    """Return A = r - mean of the group's other responses = (r - mean of the group) * n / (n - 1).

    A = 0 for a response that is alone in its group. With `whole`, r includes the shaping (such as
    minus the KL) of all tokens of the response, as in the paper, where a response is one action.
    Otherwise each token's A also gets the sum of the shaping from that token to the end.
    """
    scores_S, shaping_L = inputs.scores_S, inputs.shaping_L
    if whole:
        scores_S = scores_S + sums(shaping_L.double(), inputs.cu_loss_tokens)
        inputs = replace(inputs, shaping_L=shaping_L.new_zeros(shaping_L.shape))
    number_S, sizes = number_groups(group_S)
    factors = sizes / (sizes - 1).clamp(min=1)
    from_mean_S = scores_S - group_means(scores_S, group_S)
    return Advantages(to_tokens(inputs, from_mean_S * factors[number_S]))
