"""Group relative advantages; Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2."""

from __future__ import annotations

from torch import Tensor

from plimsoll.algorithm.groups import group_deviations, group_means, to_tokens
from plimsoll.algorithm.inputs import AdvantageInputs, Advantages
from plimsoll.config.base import PositiveFloat


def estimate(
    inputs: AdvantageInputs, group_S: Tensor, *, delta: PositiveFloat = 1e-6
) -> Advantages:
    """Return A = (r - mean of the group) / (standard deviation of the group + delta).

    Each token of a response has the response's A. The standard deviation is the one with n - 1.
    Several rewards are summed, then normalised. A group whose rewards are all equal has A = 0.
    """
    scores_S = inputs.scores_S
    from_mean_S = scores_S - group_means(scores_S, group_S)
    return Advantages(
        to_tokens(inputs, from_mean_S / (group_deviations(scores_S, group_S) + delta))
    )
