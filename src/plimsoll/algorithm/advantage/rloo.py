"""Leave one out (RLOO); Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 2.4."""

from __future__ import annotations

from torch import Tensor

from plimsoll.algorithm.groups import group_means, numbered, to_tokens
from plimsoll.algorithm.inputs import AdvantageInputs, Advantages


def estimate(inputs: AdvantageInputs, group_S: Tensor) -> Advantages:
    """A = r - mean of the group's other responses = (r - mean of the group) * n / (n - 1). A
    response alone in its group has no others: A = 0."""
    scores_S = inputs.scores_S
    number_S, sizes = numbered(group_S)
    factors = sizes / (sizes - 1).clamp(min=1)
    from_mean_S = scores_S - group_means(scores_S, group_S)
    return Advantages(to_tokens(inputs, from_mean_S * factors[number_S]))
