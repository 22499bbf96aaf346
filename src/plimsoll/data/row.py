"""A row as it was read, before anything of it is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
