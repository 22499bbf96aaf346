"""Read a row of labelled steps: a prompt, the steps of a response, and a label for each step.

The prompt is one piece of text and each step another. So a step's tokens never depend on later
text, and the steps of an unfinished response get the same scores as in the finished response. The
score of a step is read at its last token.

Every check raises `RowProblem` with the column's name as the config writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from plimsoll.data.fields import RawRow, RowProblem, kind_of, list_of, text_of
from plimsoll.data.pieces import TextPiece
from plimsoll.errors import DataError
from plimsoll.records import Floats


def steps_of(row: RawRow, column: str) -> list[str]:
    """Return the texts of the steps: at least one, none empty."""
    steps = list_of(row.values, column, "texts")
    return [text_of({place: step}, place) for place, step in _places(column, steps)]


def labels_of(row: RawRow, column: str, steps_column: str) -> Floats:
    """Return the label of each step of the response, 0 (wrong) to 1 (right); shape [steps]."""
    labels = list_of(row.values, column, "labels")
    steps = len(list_of(row.values, steps_column, "texts"))
    if len(labels) != steps:
        raise RowProblem(
            column, f"is of length {len(labels)}, but `{steps_column}` of length {steps}"
        )
    checked = [_label(label, place) for place, label in _places(column, labels)]
    return np.array(checked, dtype=np.float32)


def _places(column: str, values: Sequence[object]) -> list[tuple[str, object]]:
    return [(f"{column}[{i}]", value) for i, value in enumerate(values)]


def _label(value: object, place: str) -> float:
    if not isinstance(value, bool | int | float):
        raise RowProblem(
            place, f"must be true or false, or a number from 0 to 1, but is {kind_of(value)}"
        )
    if not 0 <= value <= 1:  # also false for NaN
        raise RowProblem(place, f"is {value}, and a label is from 0 (wrong) to 1 (right)")
    return float(value)


def step_parts(steps: Sequence[str], separator: str, *, plain: bool) -> list[str]:
    """Return the text of each step, with the separator before all but the first.

    Unless the text is `plain`, white space around a step is left out, as many chat templates strip
    a turn.
    """
    texts = list(steps) if plain else [step.strip() for step in steps]
    return [texts[0], *(separator + text for text in texts[1:])]


def step_pieces(parts: Sequence[str], rendered: Sequence[TextPiece]) -> tuple[TextPiece, ...]:
    """Return the pieces of a rendered prompt and of each step of its answer.

    Nothing comes after the last step.

    Args:
        parts: the texts of the steps, from `step_parts`; the answer is these joined.
        rendered: the pieces of the prompt and the answer.

    Raises:
        DataError: the chat template changed the steps' text.
    """
    text = "".join(piece.text for piece in rendered)
    start = text.rfind("".join(parts))
    if start < 0:
        raise DataError("has steps that the chat template writes in another way")
    spans = pairwise(accumulate(map(len, parts), initial=start))
    return (TextPiece(text[:start]), *(TextPiece(text[a:b], scored=True) for a, b in spans))
