"""Read a growing file of JSON lines as Arrow tables, each time from where the last read ended."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.json as pj

from plimsoll.config.json_text import DEEPEST
from plimsoll.errors import PlimsollError
from plimsoll.run.json_lines import iter_rows

_BLOCK = 4 * 2**20
"""Bytes that Arrow reads at once; longer than any row."""


@dataclass(frozen=True)
class FilePosition:
    """The position up to which a file has been read, in bytes."""

    inode: int = 0
    """The number of the file in its file system."""
    offset: int = 0
    size: int = 0
    """Size of the file when it was last looked at."""

    def update(self, path: Path) -> FilePosition:
        """Return the position in the file as it is now; 0 if another file has its name."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return FilePosition()
        if status.st_ino != self.inode or status.st_size < self.offset:
            return FilePosition(status.st_ino, 0, status.st_size)
        return replace(self, size=status.st_size)


def _is_safe(line: bytes) -> bool:
    """Return whether Arrow can be given a line: an object that is not nested too deeply."""
    return line.startswith(b"{") and line.count(b"[") + line.count(b"{") <= DEEPEST


def read_on(
    path: Path, place: FilePosition, most: int, schema: pa.Schema | None = None
) -> tuple[pa.Table, bytes, FilePosition] | None:
    """Return the next complete rows after `place`, their lines and the position behind them.

    Return None if there are none.
    At most `most` bytes are read, or one line if it is longer. The last line is left if it has no
    end yet. Only the columns of `schema` are read, or all if it is None. Raises PlimsollError,
    naming file and line, if a line is not a JSON object.
    """
    if place.offset >= place.size:
        return None
    with path.open("rb") as file:
        file.seek(place.offset)
        data = file.read(most)
        if b"\n" not in data:
            data += file.readline()
    data = data[: data.rfind(b"\n") + 1]
    if not data:
        return None
    if not all(map(_is_safe, data.splitlines())):
        for _ in iter_rows(path):  # refuses what Arrow would crash at
            pass
    options = pj.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
    )
    try:
        table = pj.read_json(pa.BufferReader(data), pj.ReadOptions(block_size=_BLOCK), options)
        if table["step"].null_count:
            raise KeyError("step")
    except (pa.ArrowException, KeyError) as error:
        for _ in iter_rows(path):  # names the line
            pass
        raise PlimsollError(f"{path}: its rows cannot be read together: {error}.") from error
    return table, data, replace(place, offset=place.offset + len(data))
