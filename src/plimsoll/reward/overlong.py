"""Penalty for a response that comes near the longest length; DAPO's soft overlong punishment.

Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 13.
"""

from __future__ import annotations

from plimsoll.config.base import PositiveInt
from plimsoll.records import Trajectory


def reward(
    trajectory: Trajectory, *, max_new_tokens: PositiveInt, buffer: PositiveInt, factor: float = 1.0
) -> float:
    """0 up to `max_new_tokens - buffer` tokens, then linearly down to `-factor` at
    `max_new_tokens`: -factor * min(max(0, length - (max_new_tokens - buffer)), buffer) / buffer.
    """
    over = len(trajectory.response_tokens) - (max_new_tokens - buffer)
    return -factor * min(max(0, over), buffer) / buffer
