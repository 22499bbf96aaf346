"""REINFORCE++ with the group's mean as its baseline.

Hu et al. 2025, https://arxiv.org/abs/2501.03262.
"""

from __future__ import annotations

from torch import Tensor

from plimsoll.algorithm.groups import group_means, to_tokens
from plimsoll.algorithm.inputs import AdvantageInputs, Advantages
from plimsoll.algorithm.sequences import whiten


def estimate(inputs: AdvantageInputs, group_S: Tensor) -> Advantages:
    """Return A = r - mean of the group at each token, whitened over all action tokens of the batch.

    See `whiten`.
    """
    scores_S = inputs.scores_S
    return Advantages(whiten(to_tokens(inputs, scores_S - group_means(scores_S, group_S))))
