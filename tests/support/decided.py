"""Settings of a role as a resolved run has them: with nothing left to `auto`."""

from __future__ import annotations

from typing import Any

from plimsoll.config.model import ModelConfig


def decided_model(path: str, **settings: Any) -> ModelConfig:
    """Return a model's settings; attention and kernels are those of a CPU unless they are given."""
    return ModelConfig(**{"path": path, "attention": "sdpa", "kernels": "own", **settings})
