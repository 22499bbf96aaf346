"""Penalty for a response near the longest length: DAPO's soft overlong punishment.

Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 13.
"""

from __future__ import annotations

from plimsoll.config.base import PositiveInt
from plimsoll.records import Trajectory


def reward(
    trajectory: Trajectory,
    *,
    max_new_tokens: PositiveInt,
    buffer: PositiveInt,
    factor: float = 1.0,
    observations: bool = False,
) -> float:
    """Return a penalty from 0 to -factor that grows over the last `buffer` allowed tokens.

    It is -factor * min(max(0, length - (max_new_tokens - buffer)), buffer) / buffer.

    The length is the number of sampled tokens, of all turns. With `observations` it is the number
    of all tokens after the first prompt, which `environments.*.max_tokens` also counts.
    """
    branches = trajectory.branches
    length = sum(int(b.loss_mask.sum()) for b in branches)  # a token counts in one branch only
    if observations:
        longest = max(len(b.prompt.tokens) + len(b.response_tokens) for b in branches)
        length = longest - len(branches[0].prompt.tokens)
    over = length - (max_new_tokens - buffer)
    return factor * -min(max(0, over), buffer) / buffer
