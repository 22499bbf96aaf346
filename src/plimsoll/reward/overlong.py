"""Penalty for a response that comes near the longest length; DAPO's soft overlong punishment.

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
    """Return 0 up to `max_new_tokens - buffer` tokens, then linearly down to `-factor` at
    `max_new_tokens`: -factor * min(max(0, length - (max_new_tokens - buffer)), buffer) / buffer.

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
    """Of several branches, each of which begins with what came before: in the longest."""
    branches = trajectory.branches
    longest = max(len(one.prompt.tokens) + len(one.response_tokens) for one in branches)
    return longest - len(branches[0].prompt.tokens)
