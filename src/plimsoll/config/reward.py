"""What a response is worth."""

from __future__ import annotations

from plimsoll.config.base import Choice


class RewardConfig(Choice):
    """One part of the reward: a rule of Plimsoll's (`math_answer`, `pattern`, ...) or a Python
    function by import path, with its weight."""

    weight: float = 1.0
    """The part's weight in the sum."""
