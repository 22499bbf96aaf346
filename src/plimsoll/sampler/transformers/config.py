"""The settings of the engine on transformers."""

from __future__ import annotations

from plimsoll.config.engines import RolloutEngineConfig


class TransformersConfig(RolloutEngineConfig):
    """transformers: for machines without vLLM, and for debugging; far slower."""


SAMPLING = TransformersConfig
