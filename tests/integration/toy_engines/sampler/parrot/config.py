"""The settings of the engine."""

from __future__ import annotations

from plimsoll.config.base import PositiveInt
from plimsoll.config.engines import RolloutEngineConfig


class ParrotConfig(RolloutEngineConfig):
    """The reference answers, with the log-probs that the policy gives them."""

    repeats: PositiveInt = 1
    """How many times an answer is said."""
    naps: bool = False
    """Whether the engine drops its weights while the ranks train."""

    @property
    def sleep_key(self) -> str | None:
        return "naps" if self.naps else None

    @property
    def forgets_weights(self) -> bool:
        return self.naps


SAMPLING = ParrotConfig
