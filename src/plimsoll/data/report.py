"""A row as it was read; and rows that cannot be used: one is noted where it is found, all are
judged after reading."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from plimsoll.errors import DataError
from plimsoll.run.counting import counted


@dataclass(frozen=True)
class Row:
    """One row as read.

    file: the file, directory or hub name it came from.
    line: 1-based line in JSON lines, 1-based row number in a JSON array, Parquet and `datasets`.
    values: by column, and by dotted names where the source names columns within columns; of Parquet
        and `datasets` only what the source names, where it has all of that, unless the whole row is
        asked for.
    """

    file: str
    line: int
    values: Mapping[str, object]


SHOWN = 10
"""Bad rows that an error message lists."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used.

    line: 1-based line of a JSON lines file, or row number of another source.
    field: the column (and the place within it) as the data calls it; empty for the whole row.
    """

    file: str
    line: int
    field: str
    problem: str

    def __str__(self) -> str:
        field = f" {self.field}:" if self.field else ""
        return f"{self.file}:{self.line}:{field} {self.problem}"


class RowProblem(Exception):
    """What is wrong with one field of a row; the loader turns it into a `BadRow`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem


def settle(
    source: str, read: int, rows: Sequence[BadRow], on_bad_row: Literal["stop", "skip"]
) -> None:
    """Judge all bad rows of a source, of `read` rows that were looked at.

    Raises DataError when there are bad rows and the setting is `stop`, and in both settings when no
    good row is left.
    """
    if read == 0:
        raise DataError(f"{source} holds no rows: point `path` at data with rows in it.")
    more = [f"  ... and {len(rows) - SHOWN:,} more"] if len(rows) > SHOWN else []
    listing = "\n".join([*(f"  {row}" for row in rows[:SHOWN]), *more])
    if len(rows) == read:
        raise DataError(
            f"Every row of {source} is bad ({counted(read, 'row')}), so nothing is left to use; "
            f"mend them, or check that the configured columns are the right ones.\n{listing}"
        )
    if rows and on_bad_row == "stop":
        raise DataError(
            f"{len(rows):,} of {read:,} rows of {source} cannot be used; mend them, or leave them "
            f"out with `--data.on_bad_row skip`.\n{listing}"
        )


def nearest(word: str, options: Iterable[str]) -> str:
    """A sentence that offers the options closest to a misspelt word; empty when none is close."""
    close = difflib.get_close_matches(word, sorted(options), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""
