"""A row as it was read; and rows that cannot be used: one is noted where it is found, all are
judged after reading."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
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


@dataclass(frozen=True)
class BadRows:
    """All bad rows of a source, of `read` rows that were looked at."""

    source: str
    read: int
    rows: tuple[BadRow, ...]

    def settle(self, on_bad_row: Literal["stop", "skip"]) -> tuple[BadRow, ...]:
        """The rows to list in the run directory.

        Raises DataError when there are bad rows and the setting is `stop`, and in both settings
        when no good row is left.
        """
        if self.read == 0:
            raise DataError(f"{self.source} holds no rows: point `path` at data with rows in it.")
        if len(self.rows) == self.read:
            raise DataError(
                f"Every row of {self.source} is bad ({counted(self.read, 'row')}), so nothing is "
                "left to use; mend them, or check that the configured columns are the right ones.\n"
                f"{self._listing()}"
            )
        if self.rows and on_bad_row == "stop":
            raise DataError(
                f"{len(self.rows):,} of {self.read:,} rows of {self.source} cannot be used; mend"
                f" them, or leave them out with `--data.on_bad_row skip`.\n{self._listing()}"
            )
        return self.rows

    def _listing(self) -> str:
        lines = [f"  {row}" for row in self.rows[:SHOWN]]
        if len(self.rows) > SHOWN:
            lines.append(f"  ... and {len(self.rows) - SHOWN:,} more")
        return "\n".join(lines)


def nearest(word: str, options: Iterable[str]) -> str:
    """A sentence that offers the options closest to a misspelt word; empty when none is close."""
    close = difflib.get_close_matches(word, sorted(options), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""
