"""The reward of the greedy response as the baseline (ReMax).

Li et al. 2024, https://arxiv.org/abs/2310.10505, algorithm 1.
"""

from __future__ import annotations

from torch import Tensor

from plimsoll.algorithm.groups import to_tokens
from plimsoll.algorithm.inputs import AdvantageInputs, Advantages


def estimate(inputs: AdvantageInputs, greedy_S: Tensor) -> Advantages:
    """Return A = r - r of the greedy response to the same prompt, at each token of a response."""
    return Advantages(to_tokens(inputs, inputs.scores_S - greedy_S))
