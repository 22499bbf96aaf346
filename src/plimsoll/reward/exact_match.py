"""Reward for an answer that equals the reference, letter by letter."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from plimsoll.errors import DataError
from plimsoll.records import Trajectory
from plimsoll.reward.references import checks_references, gives_answers

MARKER = "####"


def check(reference: str, *, marker: str = MARKER) -> None:
    """Raises ValueError for a reference that no text after a marker can be."""
    if marker in reference:
        raise ValueError(
            f"{reference[-200:]!r} holds the marker {marker!r}, and no text after the last marker "
            f"does: give only what stands after it"
        )


def answer(response: str, *, marker: str = MARKER) -> str | None:
    """The text after the last marker, without white space around it; None where there is none."""
    _, found, after = response.rpartition(marker)
    return after.strip() or None if found else None


@gives_answers(answer)
@checks_references(check)
def reward(
    trajectory: Trajectory, *, marker: Annotated[str, Field(min_length=1)] = MARKER
) -> float:
    """1 where the text after the last `marker`, without white space around it, is the reference;
    0 otherwise, and where there is no marker.

    Raises DataError where the prompt has no reference.
    """
    reference = trajectory.prompt.reference
    if reference is None:
        raise DataError("the prompt has no reference answer. Set data.train.reference.")
    _, found, given = trajectory.response_text.rpartition(marker)
    return float(bool(found) and given.strip() == reference.strip())
