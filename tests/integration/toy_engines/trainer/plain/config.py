"""The settings of the engine."""

from __future__ import annotations

from plimsoll.config.base import PositiveFloat, Settings


class PlainConfig(Settings):
    """Plain PyTorch: the whole model on each rank."""

    momentum: PositiveFloat = 0.9
    """The share of the last update that goes into the next."""


class FrozenPlainConfig(Settings):
    """Plain PyTorch: the whole model on each rank."""


TRAINED = PlainConfig
FROZEN = FrozenPlainConfig
