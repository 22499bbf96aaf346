"""What a row of labelled data must hold beside its conversation: whether the response is desirable.

Every check raises `RowProblem` with the column's name as it is written in the config.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.config.data import SourceConfig
from plimsoll.data.pieces import Messages
from plimsoll.data.report import RowProblem
from plimsoll.data.rows import Columns, conversation_of, kind_of, sample_columns
from plimsoll.data.sources import Row
from plimsoll.errors import ConfigError


@dataclass(frozen=True)
class LabelledColumns:
    """The columns that hold labelled responses."""

    turns: Columns
    label: str


def labelled_columns(source: SourceConfig, key: str) -> LabelledColumns:
    """The columns of labelled responses; ConfigError when it is not clear which."""
    if source.label is None:
        raise ConfigError(
            f"`{key}.label` is not set: give the column that says which responses are desirable, or"
            f" pairs, with `{key}.chosen` and `{key}.rejected`."
        )
    return LabelledColumns(sample_columns(source, key), source.label)


def answer_of(row: Row, columns: Columns) -> tuple[Messages, Messages]:
    """What is asked, and the assistant's turn at the end that is labelled."""
    messages = conversation_of(row, columns)
    last = messages[-1]["role"]
    if last != "assistant":
        raise RowProblem(
            f"{columns.turns}[{len(messages) - 1}].role",
            f"is `{last}`, but the labelled response must be the assistant's",
        )
    if len(messages) == 1:
        raise RowProblem(columns.turns, "has no turn before the response that is labelled")
    return messages[:-1], messages[-1:]


def label_of(row: Row, column: str) -> bool:
    """A row's label: true or 1 for a desirable response, false or 0 for an undesirable one. pandas
    writes such a column as 1.0 and 0.0 where some of its rows have no label."""
    value = row.values.get(column)
    if value is None:
        raise RowProblem(column, "is missing")
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    shown = f" ({value})" if isinstance(value, int | float) else ""
    raise RowProblem(column, f"must be true, false, 1 or 0, but is {kind_of(value)}{shown}")
