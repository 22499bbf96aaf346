"""What must agree about the reference that an actor is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from plimsoll.config.base import Choice
from plimsoll.config.engine import FrozenRole
from plimsoll.config.problems import Problem, conflict, invalid, show
from plimsoll.config.reference_logprobs import ReferenceLogprobsConfig

SUFFIX = ".parquet"


def stored_logprobs(settings: ReferenceLogprobsConfig) -> Iterator[Problem]:
    """A file for the reference's log-probs."""
    if settings.path is None:
        return
    if not settings.precompute:
        yield conflict(
            "reference_logprobs.path",
            show(settings.path),
            "It would be neither read nor written: the reference scores batch by batch.",
            "reference_logprobs.precompute: true, or leave reference_logprobs.path out",
            code="reference-logprobs",
        )
    if Path(settings.path).suffix != SUFFIX:
        yield invalid(
            "reference_logprobs.path",
            show(settings.path),
            "The numbers are kept as Parquet, and files of data are told by their names.",
            f"a name that ends in {SUFFIX}",
            code="reference-logprobs",
        )


def unused_reference(
    given: FrozenRole | None, logprobs: ReferenceLogprobsConfig, loss: Choice
) -> Iterator[Problem]:
    """What a loss without a reference would not look at."""
    unused = {"reference": "given"} if given is not None else {}
    if logprobs.precompute:
        unused["reference_logprobs.precompute"] = "true"
    for key, value in unused.items():
        yield conflict(
            key,
            value,
            f"The loss {loss.name} is reference-free: it would not be looked at.",
            f"leave {key} out, or algorithm.loss.name: dpo",
            code="reference-free-loss",
        )
