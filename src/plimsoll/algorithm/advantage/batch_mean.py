"""The reward minus the mean reward of the batch: the simplest baseline without groups."""

from __future__ import annotations

import torch

from plimsoll.algorithm.groups import group_means, to_tokens
from plimsoll.algorithm.inputs import AdvantageInputs, Advantages


def estimate(inputs: AdvantageInputs) -> Advantages:
    """Return A = r - mean of all responses of the step, at each token of a response."""
    scores_S = inputs.scores_S
    one_group_S = torch.zeros_like(scores_S)
    return Advantages(to_tokens(inputs, scores_S - group_means(scores_S, one_group_S)))
