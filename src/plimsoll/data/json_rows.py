"""Read rows of JSON files: one object a line, or one array of objects in the whole file.

An array is parsed in chunks, so that only a small part of a large file is in memory.
"""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from plimsoll.config.json_text import DEEPEST, check_depth
from plimsoll.data.fields import BadRow, RawRow
from plimsoll.errors import ConfigError

MOST_BYTES = 2**26
"""The most bytes of one row. A small compressed file may hold a line of gigabytes."""
_READ_AT_ONCE = 2**20
"""Bytes that are read from a file at once."""
_SPACE = " \t\n\r"


def read_json(path: Path) -> Iterator[RawRow | BadRow]:
    """Yield the rows of a file, numbered by line, or by item in an array.

    Raises:
        ConfigError: the file cannot be opened, or the rest of an array cannot be read.
    """
    if path.suffix.lower() == ".json" and _is_array(path):
        return _read_array(path)
    return _read_lines(path)


def _is_array(path: Path) -> bool:
    for raw in _chunks(path):
        start = raw.removeprefix(codecs.BOM_UTF8).lstrip()
        if start:
            return start.startswith(b"[")
    return False


def _read_lines(path: Path) -> Iterator[RawRow | BadRow]:
    for line, raw in enumerate(_raw_lines(path), start=1):
        content = raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw
        if content.strip():
            yield _parse_line(str(path), line, content)


def _raw_lines(path: Path) -> Iterator[bytes]:
    packed = path.suffix.lower() == ".gz"
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(MOST_BYTES + 1)
                if len(line) > MOST_BYTES:
                    raise ConfigError(
                        f"{path}:{number}: the line has over {MOST_BYTES:,} bytes, which is no "
                        f"row: write one JSON object a line."
                    )
                if not line:
                    return
                yield line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{path} cannot be unpacked: {str(error).rstrip('.')}. Copy the file again; or, if it "
            f"is not compressed, rename it to {path.stem}."
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def _parse_line(file: str, line: int, content: bytes) -> RawRow | BadRow:
    try:
        values = json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        return BadRow(file, line, "", not_utf8(error))
    except json.JSONDecodeError as error:
        return BadRow(file, line, "", f"is not JSON: {error.msg}, at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return BadRow(file, line, "", f"is not JSON: {error}")
    return _row(file, line, values, content.count(b"[") + content.count(b"{"))


def _row(file: str, line: int, values: object, brackets: int = DEEPEST + 1) -> RawRow | BadRow:
    """Return an item as a row. Few opening `brackets` in its text save work."""
    try:
        check_depth(values, brackets)
    except ValueError as error:
        return BadRow(file, line, "", str(error).replace("it is", "is"))
    if isinstance(values, Mapping):
        return RawRow(file, line, values)
    return BadRow(file, line, "", f"is a JSON {type(values).__name__}, not an object")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key `{counts.most_common(1)[0][0]}` is there twice")
    return values


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return a sentence that names the bytes that are not UTF-8."""
    return f"is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"


def _read_array(path: Path) -> Iterator[RawRow | BadRow]:
    text = _ArrayText(path)
    text.skip("[")
    number = 0
    while text.next_character() != "]":
        if number:
            text.skip(",")
        number += 1
        yield text.row(number)
    text.skip("]")
    if text.next_character():
        raise text.broken("something follows the array")


class _ArrayText:
    """A reader of an array's file: the text that is read but not yet parsed, and the position."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._chunks = _chunks(path)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._place = 0
        self._lines = 1  # up to the beginning of `_text`

    def next_character(self) -> str:
        """Return the next character that is no white space; "" at the end."""
        while True:
            while self._place < len(self._text):
                if self._text[self._place] not in _SPACE:
                    return self._text[self._place]
                self._place += 1
            if not self._read_more():
                return ""

    def skip(self, character: str) -> None:
        """Move past this character. Raise ConfigError if the next character is another one."""
        actual = self.next_character()
        if actual != character:
            raise self.broken(f"expecting {character!r}, found {actual!r}" if actual else "it ends")
        self._place += 1

    def row(self, number: int) -> RawRow | BadRow:
        """Return the next item as a row."""
        self.next_character()
        try:
            return _row(str(self._path), number, self._item(_object))
        except ValueError as error:  # A repeated key is known only once the item is complete.
            problem = f"is not JSON: {error}"
        try:
            self._item(dict)
        except ValueError as error:  # a number of thousands of digits
            raise self.broken(str(error)) from error
        return BadRow(str(self._path), number, "", problem)

    def _item(self, make: object) -> object:
        decoder = json.JSONDecoder(object_pairs_hook=make)  # type: ignore[arg-type]
        while True:
            try:
                item, end = decoder.raw_decode(self._text, self._place)
            except json.JSONDecodeError as error:
                if len(self._text) - self._place > MOST_BYTES:
                    raise self.broken(f"an item has over {MOST_BYTES:,} characters") from error
                if not self._read_more(len(self._text)):
                    raise self.broken(error.msg, error.pos) from error
                continue
            except RecursionError as error:
                raise self.broken(str(error)) from error
            if (
                end < len(self._text) or not self._read_more()
            ):  # A number may go on in the next chunk.
                self._place = end
                return item

    def _read_more(self, least: int = 1) -> bool:
        """Drop used text, read at least `least` characters, and return whether there were more."""
        self._lines += self._text.count("\n", 0, self._place)
        parts, size = [self._text[self._place :]], 0
        self._place = 0
        try:
            while size < least and (chunk := next(self._chunks, None)) is not None:
                parts.append(self._decoder.decode(chunk, final=not chunk))
                size += len(parts[-1])
        except UnicodeDecodeError as error:
            raise self.broken(not_utf8(error)) from error
        self._text = "".join(parts)
        return size > 0

    def broken(self, why: str, place: int | None = None) -> ConfigError:
        """Return the error that the array cannot be read from this place on."""
        line = self._lines + self._text.count("\n", 0, self._place if place is None else place)
        return ConfigError(f"{self._path}:{line}: the JSON array cannot be read on: {why}.")


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes in chunks, and b"" at its end."""
    try:
        with path.open("rb") as file:
            while chunk := file.read(_READ_AT_ONCE):
                yield chunk
            yield b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
