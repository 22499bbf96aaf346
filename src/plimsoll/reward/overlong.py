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
    """Return a penalty that grows with the last `buffer` tokens before the longest length.

    It is -factor * min(max(0, length - (max_new_tokens - buffer)), buffer) / buffer.

    The length of an episode of several turns is the number of its sampled tokens. With
    `observations` it is all that follows the first prompt, as `environments.*.max_tokens` counts.
    """
    length = _episode_tokens(trajectory) if observations else _sampled_tokens(trajectory)
    over = length - (max_new_tokens - buffer)
    return factor * -min(max(0, over), buffer) / buffer


def _sampled_tokens(trajectory: Trajectory) -> int:
    """Each sampled token is learned in one branch only."""
    return sum(int(branch.loss_mask.sum()) for branch in trajectory.branches)


def _episode_tokens(trajectory: Trajectory) -> int:
    """Return the length of the longest branch: each begins with what came before."""
    branches = trajectory.branches
    longest = max(len(branch.prompt.tokens) + len(branch.response_tokens) for branch in branches)
    return longest - len(branches[0].prompt.tokens)
