"""The reward of rl_against_trl.py."""

from __future__ import annotations

from plimsoll.records import Trajectory


def digits(trajectory: Trajectory) -> float:
    """The share of digits among the characters of a response."""
    text = trajectory.response_text
    return sum(map(str.isdigit, text)) / max(1, len(text))
