"""Group relative advantages without the division by the standard deviation (Dr. GRPO).

The division favours prompts that are nearly always or nearly never solved. Liu et al. 2025,
https://arxiv.org/abs/2503.20783, section 3.2.
"""

from __future__ import annotations

from torch import Tensor

from plimsoll.algorithm.groups import group_means, to_tokens
from plimsoll.algorithm.inputs import AdvantageInputs, Advantages


def estimate(inputs: AdvantageInputs, group_S: Tensor) -> Advantages:
    """Return A = r - mean of the group, at each token of a response."""
    scores_S = inputs.scores_S
    return Advantages(to_tokens(inputs, scores_S - group_means(scores_S, group_S)))
