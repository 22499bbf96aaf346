"""Reward for an answer that equals the reference, letter by letter."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from plimsoll.errors import DataError
from plimsoll.records import Trajectory
from plimsoll.reward.answers import ANSWER_TAG, MARKER, after_last, last_within
from plimsoll.reward.references import checks_references, gives_answers


def check(reference: str, *, marker: str = MARKER, tag: str = ANSWER_TAG) -> None:
    """Raise ValueError if a reference holds a marker or a tag, as then no answer can equal it."""
    if marker in reference:
        raise ValueError(
            f"{reference[-200:]!r} holds the marker {marker!r}, and no text after the last marker "
            f"does: give only what stands after it"
        )
    if last_within(reference, tag) is not None:
        raise ValueError(
            f"{reference[-200:]!r} holds <{tag}>...</{tag}>, and no answer does: give only what "
            f"stands within"
        )


def answer(response: str, *, marker: str = MARKER, tag: str = ANSWER_TAG) -> str | None:
    """Return a response's answer: the text in the last `<tag>...</tag>`, or after the last marker.

    If the text in the tags has a marker, only what follows the marker is returned. None if the
    answer is empty, or if there are neither tags nor a marker.
    """
    inside = last_within(response, tag)
    after = after_last(response if inside is None else inside, marker)
    return (inside if after is None else after) or None


@gives_answers(answer)
@checks_references(check)
def reward(
    trajectory: Trajectory,
    *,
    marker: Annotated[str, Field(min_length=1)] = MARKER,
    tag: str = ANSWER_TAG,
) -> float:
    """Return 1 if the response's `answer` equals the reference, else 0.

    White space at the reference's ends is ignored.

    Raises DataError if the prompt has no reference.
    """
    reference = trajectory.prompt.reference
    if reference is None:
        raise DataError("the prompt has no reference answer. Set data.train.reference.")
    given = answer(trajectory.response_text, marker=marker, tag=tag)
    return float(given == reference.strip())
