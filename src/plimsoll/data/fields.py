"""Read one field of a row and check it.

Every check raises `RowProblem` with the field's name as the config writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import NoneType

from plimsoll.data.report import RowProblem

SYSTEM, INPUT, HISTORY = BESIDE = ("system", "input", "history")
"""The columns that are read beside a prompt, and that no setting names: the system message, the
rest of Alpaca's `instruction`, and the turns before the prompt.
"""
_LARGEST_EXACT = 2**53
"""Up to this number, every whole number has a float of its own."""


def text_of(values: Mapping[str, object], column: str) -> str:
    """Return a column's text; it must not be empty."""
    return checked_text(present(values, column), column)


def list_of(values: Mapping[str, object], column: str, what: str) -> list[object]:
    """Return a column's list; it must not be empty.

    Args:
        values: the row's values.
        column: the column's name.
        what: the word for the items of the list in error messages.
    """
    value = present(values, column)
    if not isinstance(value, list):
        raise RowProblem(column, f"must be a list of {what}, but is {kind_of(value)}")
    if not value:
        raise RowProblem(column, "is empty")
    return value


def number_of(values: Mapping[str, object], column: str, what: str) -> int | float:
    """Return a column's number.

    Args:
        values: the row's values.
        column: the column's name.
        what: the words for the number in error messages.
    """
    value = present(values, column)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowProblem(column, f"must be {what}, but is {kind_of(value)}")
    return value


def present(values: Mapping[str, object], name: str, place: str = "") -> object:
    """Return the value of this name; it must not be missing or null.

    Args:
        values: the values of a row, or of an object within it.
        name: the name of the value.
        place: the place of the object within the row; empty for the row itself.
    """
    value = values.get(name)
    if value is None:
        raise RowProblem(f"{place}.{name}" if place else name, "is missing")
    return value


def checked_text(value: object, field: str) -> str:
    """Return the value; it must be text with more than white space, and valid Unicode."""
    if not isinstance(value, str):
        raise RowProblem(field, f"must be text, but is {kind_of(value)}")
    if not value.strip():
        raise RowProblem(field, "is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        why = f"half of a surrogate pair, U+{ord(value[error.start]):04X}"
        raise RowProblem(field, f"is not valid Unicode: {why}") from error
    return value


def kind_of(value: object) -> str:
    """Return JSON's word for the type of a value."""
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text"}
    kinds |= {list: "a list", dict: "an object", NoneType: "null"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def is_plain(value: object) -> bool:
    """Return whether JSON can hold a value: text, number, boolean, null, list or object."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return value is None or isinstance(value, str | bool | int | float)


def reference_text(value: object) -> str:
    """Return a reference as the text that rewards compare.

    Text stays as it is; any other value becomes JSON. A whole number gets no fraction, because
    columnar data write 72 as 72.0 if some rows have no value.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_EXACT:
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)
