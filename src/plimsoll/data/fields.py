"""Read and check the fields of a row, and report all rows of a source that cannot be used.

Every check raises `RowProblem` with the field's name as the config writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Literal

from plimsoll.config.files import nearest
from plimsoll.errors import DataError
from plimsoll.run.numbers import plural


@dataclass(frozen=True)
class RawRow:
    """One row as read."""

    file: str
    """The file, directory or hub name that the row came from."""
    line: int
    """The line from 1 in JSON lines; the row number from 1 in a JSON array, Parquet and `datasets`.
    """
    values: Mapping[str, object]
    """The row's values by column, and by dotted name where the source names nested columns.

    Parquet and `datasets` give only the columns that the source names, unless one of those is
    missing or whole rows are read.
    """


@dataclass(frozen=True)
class ReferenceCheck:
    """A check of the reference answers of prompts."""

    check: Callable[[object], object]
    """Takes a reference as the row has it, and raises DataError if it cannot be used. The row is
    then bad."""
    made_by: Sequence[object]
    """Values for JSON that decide what the check refuses."""


SHOWN = 10
"""The number of bad rows that an error message lists."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used."""

    file: str
    line: int
    """The line from 1 of a JSON lines file, or the row number of another source."""
    field: str
    """The column and the place in it, such as `messages[2].role`; empty for the whole row."""
    problem: str

    def __str__(self) -> str:
        field = f" {self.field}:" if self.field else ""
        return f"{self.file}:{self.line}:{field} {self.problem}"


class RowProblem(Exception):
    """An error in one field of a row. The loader turns it into a `BadRow`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem


def settle(
    source: str, read: int, rows: Sequence[BadRow], on_bad_row: Literal["stop", "skip"]
) -> None:
    """Raise DataError if a source's bad rows stop the run; call it after all rows were read.

    Args:
        source: the path of the source.
        read: how many rows of the source were read, bad ones included.
        rows: the bad rows.
        on_bad_row: the setting `data.on_bad_row`.

    Raises:
        DataError: there are bad rows and the setting is `stop`; or there is no good row.
    """
    if read == 0:
        raise DataError(f"{source} holds no rows: point `path` at data with rows in it.")
    more = [f"  ... and {len(rows) - SHOWN:,} more"] if len(rows) > SHOWN else []
    listing = "\n".join([*(f"  {row}" for row in rows[:SHOWN]), *more])
    if len(rows) == read:
        raise DataError(
            f"Every row of {source} is bad ({plural(read, 'row')}), so nothing is left to use; "
            f"mend them, or check that the configured columns are the right ones.\n{listing}"
        )
    if rows and on_bad_row == "stop":
        raise DataError(
            f"{len(rows):,} of {read:,} rows of {source} cannot be used; mend them, or leave them "
            f"out with `--data.on_bad_row skip`.\n{listing}"
        )


def nearest_file(path: Path) -> str:
    """Return a sentence that offers the file with the name closest to a missing one's, or ""."""
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    return nearest(path.name, (file.name for file in beside))


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
