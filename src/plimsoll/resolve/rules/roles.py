"""Rules about the settings of one role: adapters, quantised models and a reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from plimsoll.config.base import Choice
from plimsoll.config.engine import FrozenRole, ReferenceLogprobsConfig, TrainedRole
from plimsoll.config.problems import Problem, Section, conflict


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
    """Yield a problem if a role's adapter has dropout although its log-probs must be repeatable.

    A job calls this if its loss compares log-probs from two forward passes.
    """
    if role.adapter is not None and role.adapter.dropout > 0:
        why = "Each forward pass would drop other inputs, so the ratio of new to old probabilities "
        why += "would be noise."
        fix = f"{name}.adapter.dropout: 0; dropout is for sft and dpo"
        yield Section(name, role).conflict("adapter.dropout", why, fix, "adapter-dropout")


SUFFIX = ".parquet"


def stored_logprobs(settings: ReferenceLogprobsConfig) -> Iterator[Problem]:
    """Yield problems of the settings for a file of the reference's log-probs."""
    at = Section("reference_logprobs", settings)
    if settings.path is None:
        return
    if not settings.precompute:
        why = "It would be neither read nor written: the reference scores batch by batch."
        fix = "reference_logprobs.precompute: true, or leave reference_logprobs.path out"
        yield at.conflict("path", why, fix, "reference-logprobs")
    if Path(settings.path).suffix != SUFFIX:
        why = "The numbers are kept as Parquet, and files of data are told by their names."
        fix = f"a name that ends in {SUFFIX}"
        yield at.invalid("path", why, fix, "reference-logprobs")


def unused_reference(
    given: FrozenRole | None, logprobs: ReferenceLogprobsConfig, loss: Choice
) -> Iterator[Problem]:
    """Yield a problem for each setting of the reference, for a loss that uses no reference."""
    unused = {"reference": "given"} if given is not None else {}
    if logprobs.precompute:
        unused["reference_logprobs.precompute"] = "true"
    for key, value in unused.items():
        why = f"The loss {loss.name} is reference-free: it would not be looked at."
        fix = f"leave {key} out, or algorithm.loss.name: dpo"
        yield conflict(key, value, why, fix, code="reference-free-loss")
