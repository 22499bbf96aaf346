"""Read a row of labelled steps: a prompt, the steps of a response, and a label for each step.

The prompt is one piece of text and each step another. So a step's tokens never depend on later
text, and the steps of an unfinished response get the same scores as in the finished response. The
score of a step is read at its last token.

Every check raises `RowProblem` with the column's name as the config writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from plimsoll.data.fields import kind_of, list_of, text_of
from plimsoll.data.pieces import Messages, TextPiece
from plimsoll.data.report import RawRow, RowProblem
from plimsoll.errors import DataError
from plimsoll.records import Floats

if TYPE_CHECKING:  # slow to import, and a dry run reads steps, too
    from plimsoll.data.template import Template


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


def step_pieces(
    template: Template, prompt: Messages, steps: Sequence[str], separator: str
) -> tuple[TextPiece, ...]:
    """Return the pieces of the prompt and of each step with the separator before it.

    Nothing comes after the last step. With a chat template, white space around a step is left out,
    as many templates strip a turn.

    Raises:
        DataError: the chat template refuses the messages or changes the steps' text.
    """
    texts = list(steps) if template.jinja is None else [step.strip() for step in steps]
    parts = [texts[0], *(separator + text for text in texts[1:])]
    response = "".join(parts)
    answer = [{"role": "assistant", "content": response}]
    text = "".join(piece.text for piece in template.render_answer(prompt, answer))
    start = text.rfind(response)
    if start < 0:
        raise DataError("has steps that the chat template writes in another way")
    spans = pairwise(accumulate(map(len, parts), initial=start))
    return (TextPiece(text[:start]), *(TextPiece(text[a:b], scored=True) for a, b in spans))
