"""What must agree about adapters and quantised models."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.engine import TrainedRole
from plimsoll.config.problems import Problem, Section


def check_adapter(name: str, role: TrainedRole) -> Iterator[Problem]:
    """Yield problems of a trained role's adapter and quantisation."""
    at = Section(name, role)
    if role.model.quantization == "nf4" and role.adapter is None:
        why = "Weights of 4 bits cannot be trained, and there is no adapter to train instead."
        fix = f"an adapter, such as {name}.adapter.rank: 16, or {name}.model.quantization: none"
        yield at.conflict("model.quantization", why, fix, "four-bit-training")
    if role.adapter is None:
        return
    if not role.adapter.targets:
        why = "No layer would get an adapter, so nothing would be trained."
        fix = "[all-linear], or the names of some layers"
        yield at.invalid("adapter.targets", why, fix, "adapter-targets")


def check_steadiness(name: str, role: TrainedRole) -> Iterator[Problem]:
    """Yield problems of an adapter whose log-probs are compared with earlier ones of its own."""
    if role.adapter is not None and role.adapter.dropout > 0:
        why = "Each forward pass would drop other inputs, so the ratio of new to old probabilities "
        why += "would be noise."
        fix = f"{name}.adapter.dropout: 0; dropout is for sft and dpo"
        yield Section(name, role).conflict("adapter.dropout", why, fix, "adapter-dropout")
