"""What must agree about the reference that an actor is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from plimsoll.config.base import Choice
from plimsoll.config.engine import FrozenRole, ReferenceLogprobsConfig
from plimsoll.config.problems import Problem, Section, conflict

SUFFIX = ".parquet"


def stored_logprobs(settings: ReferenceLogprobsConfig) -> Iterator[Problem]:
    """Yield problems of a file for the reference's log-probs."""
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
    """Yield settings that a loss without a reference would not read."""
    unused = {"reference": "given"} if given is not None else {}
    if logprobs.precompute:
        unused["reference_logprobs.precompute"] = "true"
    for key, value in unused.items():
        why = f"The loss {loss.name} is reference-free: it would not be looked at."
        fix = f"leave {key} out, or algorithm.loss.name: dpo"
        yield conflict(key, value, why, fix, code="reference-free-loss")
