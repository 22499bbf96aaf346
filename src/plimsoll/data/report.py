"""A row as read, and the report of all rows of a source that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
