"""What must agree about a reference that scores everything before the actor is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from plimsoll.config.problems import Problem, show
from plimsoll.config.reference_logprobs import ReferenceLogprobsConfig

SUFFIX = ".parquet"


def stored_logprobs(settings: ReferenceLogprobsConfig) -> Iterator[Problem]:
    """A file for the reference's log-probs."""
    if settings.path is None:
        return
    if not settings.precompute:
        yield Problem(
            "reference_logprobs.path",
            show(settings.path),
            "It would be neither read nor written: the reference scores batch by batch.",
            "reference_logprobs.precompute: true, or leave reference_logprobs.path out",
            code="reference-logprobs",
            conflict=True,
        )
    if Path(settings.path).suffix != SUFFIX:
        yield Problem(
            "reference_logprobs.path",
            show(settings.path),
            "The numbers are kept as Parquet, and files of data are told by their names.",
            f"a name that ends in {SUFFIX}",
            code="reference-logprobs",
        )
