"""The engine's requirements on a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plimsoll.config.problems import Problem, conflict
from plimsoll.resolve.engine_rules import TrainerRules
from plimsoll.resolve.run_spec import RunSpec

from .config import FrozenPlainConfig, PlainConfig


def _full_momentum(spec: RunSpec[Any]) -> Iterator[Problem]:
    for name, role in spec.trained.items():
        if role.optimizer.kind != "adamw":
            key, why = f"{name}.optimizer.kind", "The plain engine keeps its momentum in full."
            yield conflict(key, role.optimizer.kind, why, f"leave {key} out", "optimizer-value")


RULES = TrainerRules(
    settings=_full_momentum,
    describe=lambda role: "plain PyTorch",
    decide=lambda role: role.settings_of(PlainConfig),
    measuring=lambda role: FrozenPlainConfig(),
)
