"""Rows of a run as JSON lines. A file stays readable if a crash cuts its last line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from plimsoll.config.json_text import parse_json
from plimsoll.errors import ConfigError
from plimsoll.run.files import append_whole, write_whole
from plimsoll.run.numbers import strict_json

JsonRow = Mapping[str, Any]


def row_line(row: JsonRow) -> str:
    """Return a row as one line of strict JSON, in which NaN and infinity are null."""
    return strict_json(row) + "\n"


def document(row: JsonRow) -> str:
    """Return a row as indented JSON text for a file, in which NaN and infinity are null."""
    return strict_json(row, indent=2) + "\n"


def write_rows(path: Path, rows: Iterable[JsonRow]) -> None:
    """Write a file of rows, replacing an old file atomically."""
    write_whole(path, "".join(map(row_line, rows)))


def append_row(path: Path, row: JsonRow) -> None:
    """Append a row; see `append_rows`."""
    append_rows(path, [row])


def append_rows(path: Path, rows: Iterable[JsonRow]) -> None:
    """Append all rows; on an error append none of them and raise PlimsollError."""
    append_whole(path, "".join(map(row_line, rows)).encode())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a file; see `iter_rows`."""
    return list(iter_rows(path))


def iter_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, without a last line that a crash cut.

    Raises ConfigError if another line is no JSON object with a `step`.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):  # else torn
                yield _parse(path, f"line {number}", line)


def keep_rows_until(path: Path, step: int) -> None:
    """Remove the rows of steps after `step`, and a cut last line, from a file if it exists.

    Rows are in the order of their steps, so only what is removed is read, from the end.
    """
    if path.exists() and path.stat().st_size:
        with path.open("r+b") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as text:
            end = text.rfind(b"\n") + 1
            while end:
                begin = text.rfind(b"\n", 0, end - 1) + 1
                if _parse(path, f"byte {begin + 1:,}", text[begin:end])["step"] <= step:
                    break
                end = begin
            file.truncate(end)


def _parse(path: Path, where: str, line: bytes) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise _broken(path, where, f"no JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise _broken(path, where, "no object with a whole number as `step`")
    return row


def _broken(path: Path, where: str, why: str) -> ConfigError:
    return ConfigError(f"{path}, {where}: {why}. Remove the line, or start a new run.directory.")
