"""Whether the first answer is right: a part of the reward without a weight, so that it is measured
beside the second, and not learned from."""

from __future__ import annotations

from plimsoll.records import Trajectory


def right(trajectory: Trajectory) -> float:
    """1 or 0, as the environment found; 0 for an episode that had no second turn."""
    return trajectory.figures.get("first_right", 0.0)
