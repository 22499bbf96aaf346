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
    length = _episode_tokens(trajectory) if observations else _sampled_tokens(trajectory)
    over = length - (max_new_tokens - buffer)
    return factor * -min(max(0, over), buffer) / buffer


def _sampled_tokens(trajectory: Trajectory) -> int:
    """Return the number of sampled tokens; each has loss mask 1 in one branch only."""
    return sum(int(branch.loss_mask.sum()) for branch in trajectory.branches)


def _episode_tokens(trajectory: Trajectory) -> int:
    """Return the number of tokens after the first prompt in the longest branch."""
    branches = trajectory.branches
    longest = max(len(branch.prompt.tokens) + len(branch.response_tokens) for branch in branches)
    return longest - len(branches[0].prompt.tokens)
