"""Penalty for a response that did not come to its end."""

from __future__ import annotations

from plimsoll.records import Trajectory


def reward(trajectory: Trajectory, *, value: float = -1.0) -> float:
    """Return `value` if the response was cut at the longest length, 0 if it ended by itself."""
    return value if trajectory.finish_reason == "length" else 0.0
