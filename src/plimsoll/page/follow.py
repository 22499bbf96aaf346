"""A file of JSON lines read on from where it was left, as Arrow tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.json as pj

from plimsoll.errors import PlimsollError
from plimsoll.run.json_lines import iter_rows

_BLOCK = 4 * 2**20
"""That Arrow reads at once; longer than any row. Bytes."""


@dataclass(frozen=True)
class FilePosition:
    """How far a file has been read, in bytes. inode: which file it was. size: when last seen."""

    inode: int = 0
    offset: int = 0
    size: int = 0

    def seen(self, path: Path) -> FilePosition:
        """The same place in the file as it is now; its beginning where another file has its name,
        as after a run was resumed."""
        try:
            found = path.stat()
        except FileNotFoundError:
            return FilePosition()
        if found.st_ino != self.inode or found.st_size < self.offset:
            return FilePosition(found.st_ino, 0, found.st_size)
        return replace(self, size=found.st_size)


@dataclass(frozen=True)
class NewRows:
    """Rows that have been read, and the lines that they were; behind them is `place`."""

    rows: pa.Table
    lines: bytes
    place: FilePosition


def read_on(
    path: Path, place: FilePosition, most: int, schema: pa.Schema | None = None
) -> NewRows | None:
    """The next whole rows of at most so many bytes. None where there are none: a line that is half
    written waits for its end. schema: of what is read; default: all.

    Raises PlimsollError naming file and line where a line is no JSON object.
    """
    data = _whole_lines(path, place, most)
    if not data:
        return None
    options = pj.ParseOptions(
        explicit_schema=schema,
        unexpected_field_behavior="infer" if schema is None else "ignore",
    )
    try:
        table = pj.read_json(pa.BufferReader(data), pj.ReadOptions(block_size=_BLOCK), options)
        if table["step"].null_count:
            raise KeyError("step")
    except (pa.ArrowException, KeyError) as error:
        for _ in iter_rows(path):  # names the line
            pass
        raise PlimsollError(f"{path}: its rows cannot be read together: {error}.") from error
    return NewRows(table, data, replace(place, offset=place.offset + len(data)))


def _whole_lines(path: Path, place: FilePosition, most: int) -> bytes:
    """At least one, where there is one."""
    if place.offset >= place.size:
        return b""
    with path.open("rb") as file:
        file.seek(place.offset)
        data = file.read(most)
        if b"\n" not in data:
            data += file.readline()
    return data[: data.rfind(b"\n") + 1]
