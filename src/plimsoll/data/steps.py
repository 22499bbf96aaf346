"""What a row of labelled steps must hold: a prompt, the steps of a response, and a label for each.

Also how they become text: the prompt is one piece and each step another, so that a step's tokens
never depend on what comes after it, and a response that is not finished yet is scored as it will
be when it is. The score of a step is read at its last token.

Every check raises `RowProblem` with the column's name as it is written in the config.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from plimsoll.data.fields import kind_of, list_of, text_of
from plimsoll.data.pieces import Messages, Piece
from plimsoll.data.report import Row, RowProblem
from plimsoll.errors import DataError
from plimsoll.records import Floats

if TYPE_CHECKING:  # heavy, and a dry run looks at steps, too
    from plimsoll.data.template import Template


def steps_of(row: Row, column: str) -> list[str]:
    """The texts of the steps, at least one, none empty."""
    steps = list_of(row.values, column, "texts")
    return [text_of({place: step}, place) for place, step in _places(column, steps)]


def labels_of(row: Row, column: str, steps_column: str) -> Floats:
    """A label for each step: 0 or 1, or between."""
    labels = list_of(row.values, column, "labels")
    steps = len(list_of(row.values, steps_column, "texts"))
    if len(labels) != steps:
        raise RowProblem(
            column, f"is of length {len(labels)}, but `{steps_column}` of length {steps}"
        )
    found = [_label(label, place) for place, label in _places(column, labels)]
    return np.array(found, dtype=np.float32)


def _places(column: str, values: Sequence[object]) -> list[tuple[str, object]]:
    return [(f"{column}[{i}]", value) for i, value in enumerate(values)]


def _label(value: object, place: str) -> float:
    if not isinstance(value, bool | int | float):
        raise RowProblem(
            place, f"must be true or false, or a number from 0 to 1, but is {kind_of(value)}"
        )
    if not 0 <= value <= 1:  # NaN is not, either
        raise RowProblem(place, f"is {value}, and a label is from 0 (wrong) to 1 (right)")
    return float(value)


def step_pieces(
    template: Template, prompt: Messages, steps: Sequence[str], separator: str
) -> tuple[Piece, ...]:
    """The prompt, and each step with the separator before it; nothing after the last step.

    With a chat template white space around a step is left out: many templates strip a turn.

    Raises DataError where the chat template refuses the messages or changes the steps' text.
    """
    texts = list(steps) if template.jinja is None else [step.strip() for step in steps]
    parts = [texts[0], *(separator + text for text in texts[1:])]
    said = "".join(parts)
    answer = [{"role": "assistant", "content": said}]
    text = "".join(piece.text for piece in template.render_answer(prompt, answer))
    start = text.rfind(said)
    if start < 0:
        raise DataError("has steps that the chat template writes in another way")
    ends = accumulate(map(len, parts), initial=start)
    return (Piece(text[:start]), *(Piece(text[a:b], scored=True) for a, b in pairwise(ends)))
