"""Rows of a run as JSON lines. A file stays readable if a crash cuts its last line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from plimsoll.config.json_text import parse_json
from plimsoll.errors import ConfigError
from plimsoll.run.files import append_whole, whole_file, write_whole
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
    return (row for _, row in _lines(path))


def keep_rows_until(path: Path, step: int) -> None:
    """Remove the rows of steps after `step`, and a cut last line, from a file if it exists."""
    if path.exists():
        with whole_file(path) as partial, partial.open("wb") as kept:
            kept.writelines(line for line, row in _lines(path) if row["step"] <= step)


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield (line, row) for each line that is complete."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):  # else torn
                yield line, _parse(path, number, line)


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise _broken(path, number, f"no JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise _broken(path, number, "no object with a whole number as `step`")
    return row


def _broken(path: Path, number: int, why: str) -> ConfigError:
    return ConfigError(
        f"{path}, line {number}: {why}. Remove the line, or start a new run.directory."
    )
