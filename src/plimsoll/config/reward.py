"""Where the reward of a response comes from."""

from __future__ import annotations

from plimsoll.config.base import Choice, Settings
from plimsoll.config.engine import FrozenRole


class RewardConfig(Choice):
    """One part of the reward: a rule of Plimsoll's (`math_answer`, `pattern`, ...) or a Python
    function by import path, with its weight."""

    weight: float = 1.0
    """The part's weight in the sum."""


class RewardModelConfig(Settings):
    """A trained reward model that scores whole responses: a sequence classifier with one label and
    the actor's tokenizer."""

    role: FrozenRole
    """The model, and how it is kept."""
    weight: float = 1.0
    """The score's weight in the sum."""
