"""What the engine asks of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plimsoll.trainer.plain.config import FrozenPlainConfig, PlainConfig

from plimsoll.config.problems import Problem, conflict
from plimsoll.resolve.engine_rules import TrainerRules
from plimsoll.resolve.run_spec import RunSpec


def _one_rank(spec: RunSpec[Any]) -> Iterator[Problem]:
    if spec.cluster.ranks > 1:
        why = "The plain engine divides nothing."
        yield conflict(
            "cluster.ranks", str(spec.cluster.ranks), why, "cluster.ranks: 1", code="offload-stage"
        )


RULES = TrainerRules(
    settings=_one_rank,
    describe=lambda role: "plain PyTorch",
    decide=lambda role: role.settings_of(PlainConfig),
    measuring=lambda role: FrozenPlainConfig(),
)
