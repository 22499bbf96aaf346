"""The settings of the engine."""

from __future__ import annotations

from plimsoll.config.base import PositiveInt
from plimsoll.config.engines import RolloutEngineConfig


class ParrotConfig(RolloutEngineConfig):
    """The reference answers, with the log-probs that the policy gives them."""

    repeats: PositiveInt = 1
    """How many times an answer is said."""


SAMPLING = ParrotConfig
