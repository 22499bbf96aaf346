"""What a row says of its prompt in numbers: by which it is drawn, and how long a response may be.

Every check raises `RowProblem` with the column's name as it is written in the config.
"""

from __future__ import annotations

from math import inf

from plimsoll.config.rollout import SamplingConfig
from plimsoll.data.report import RowProblem
from plimsoll.data.row import Row
from plimsoll.data.rows import kind_of


def order_of(row: Row, column: str | None) -> float | None:
    """The number that a row is drawn by; None without a column for it."""
    if column is None:
        return None
    value = _number(row, column, "a number")
    if not -inf < value < inf:  # NaN is not, either
        raise RowProblem(column, f"is {value}, and rows are drawn by a finite number")
    return float(value)


def limit_of(row: Row, column: str | None, sampling: SamplingConfig) -> int | None:
    """The longest response to a prompt, in tokens, within what `sampling` allows; None without a
    column for it. pandas writes whole numbers as 64.0 where some rows have none."""
    if column is None:
        return None
    value = _number(row, column, "a whole number")
    least, most = max(1, sampling.min_new_tokens), sampling.max_new_tokens
    if value % 1 or not least <= value <= most:  # NaN and infinity, too
        why = f"is {value}, and the longest response is a whole number from {least} to {most:,}"
        raise RowProblem(column, f"{why}, as sampling's min_new_tokens and max_new_tokens say")
    return int(value)


def _number(row: Row, column: str, what: str) -> int | float:
    value = row.values.get(column)
    if value is None:
        raise RowProblem(column, "is missing")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowProblem(column, f"must be {what}, but is {kind_of(value)}")
    return value
