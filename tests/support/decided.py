"""Settings of a role as a resolved run has them: with nothing left to `auto`."""

from __future__ import annotations

from typing import Any

from plimsoll.config.engine import ModelConfig, TrainedRole
from plimsoll.resolve.engine_rules import trainer_rules


def decided_model(path: str, **settings: Any) -> ModelConfig:
    """Return a model's settings; attention and kernels are those of a CPU unless they are given."""
    return ModelConfig(**{"path": path, "attention": "sdpa", "kernels": "own", **settings})


def decided_role(role: TrainedRole) -> TrainedRole:
    """Return a role whose engine's settings are decided as `resolve` decides them."""
    return role.with_engine(trainer_rules(role).decide(role))
