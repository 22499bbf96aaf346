"""What must agree about where and how a trained role keeps its activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plimsoll.config.problems import Problem, Section
from plimsoll.spec.run_spec import RunSpec


def memory_levers(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield what contradicts in the checkpointing of the roles that learn."""
    for name, role in spec.trained.items():
        if role.model.gradient_checkpointing is not False:
            continue
        for key, unset in (("checkpoint_every", 1), ("activation_offload", "none")):
            if getattr(role.model, key) != unset:
                why = f"No layer is checkpointed ({name}.model.gradient_checkpointing: false)."
                fix = f"{name}.model.gradient_checkpointing: true, or leave {name}.model.{key} out"
                yield Section(name, role).conflict(f"model.{key}", why, fix, "checkpointing-off")
