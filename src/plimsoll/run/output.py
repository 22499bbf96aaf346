"""Write to standard streams and `run.log`, and read the logs of other processes.

All that a command prints is made safe here (`safe_text`), whoever made the text: a terminal would
execute control codes, and show text after marks of direction in another order.

A standard stream may not be writable: its reader has ended (`plimsoll ... | head -1`), the disk is
full, or the process started without the stream (`>&-`). `run.log` has the lines that a run shows
on the console, each with the time.
"""

from __future__ import annotations

import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from threading import Lock
from typing import Any, TextIO, cast

from plimsoll.config.secrets import mask_secrets

_STANDARD_ERROR = 2

NOT_PLAIN = re.compile(r"[^\t\n -~]")
"""Characters that are not plain ASCII; `safe_text` escapes some of them."""
_SHOWN_AS_CODES = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode's categories of control codes, format marks (such as changes of direction), surrogates
and separators of lines and paragraphs."""
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""Colours and cursor movements of a terminal."""


def safe_text(text: str) -> str:
    r"""Return a text that is safe to print: control codes as `\\x1b`, and secrets as `***`.

    Tabs and line ends stay.
    """
    return NOT_PLAIN.sub(_escape, mask_secrets(text))


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    plain = unicodedata.category(character) not in _SHOWN_AS_CODES
    return character if plain else character.encode("unicode_escape").decode()


def safe_output(text: str) -> str:
    r"""Return what a library prints, made safe: without colours, and with a `\\r` at its beginning.

    Progress bars begin so.
    """
    begin = "\r" if text[:1] == "\r" and text[1:2] != "\n" else ""
    body = _COLOURS.sub("", text.removeprefix(begin).replace("\r\n", "\n"))
    return begin + safe_text(body)


class SafeStream:
    """A text stream that makes what is written to it safe, also by libraries."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text, made safe, and return its length."""
        self.stream.write(safe_output(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the texts, made safe."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def beneath(stream: TextIO) -> TextIO:
    """Return the stream that a safe stream writes to; another stream as it is."""
    return stream.stream if isinstance(stream, SafeStream) else stream


class Drawn(str):
    """A text that a `Terminal` has drawn: what is in it is safe, and its colours are our own."""


@contextmanager
def safe_streams() -> Iterator[None]:
    """During the block, make safe what this process writes to standard output and error."""
    out, err = SafeStream(sys.stdout), SafeStream(sys.stderr)
    with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, err)):
        yield


def say(text: str) -> None:
    """Print a message on standard error."""
    print(safe_text(text), file=sys.stderr, flush=True)


def open_missing() -> None:
    """Open each standard stream that is missing in this process on /dev/null.

    Otherwise the first files that the process opens would get the descriptors of these streams,
    and the output of libraries would be written into these files.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # takes the lowest place that is free
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))


def silence(descriptor: int) -> None:
    """Redirect a descriptor to /dev/null; text in Python's buffers goes there, too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def tell(line: str) -> None:
    """Write a line to standard error at once, without Python's buffers.

    A signal handler may call this even while it interrupts print().
    """
    try:
        os.write(_STANDARD_ERROR, f"{safe_text(line)}\n".encode())
    except OSError:
        silence(_STANDARD_ERROR)


MOST_BYTES = 10 * 2**20
"""Size in bytes at which a log is renamed to `NAME-older.log`, replacing the older file."""


class RunLog:
    """A log file to which lines are appended.

    An error of the disk does not end the run; it is reported once on standard error. A file of
    `most_bytes` becomes `NAME-older.log`, and a new one begins.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._is_open = True

    def add(self, text: str) -> None:
        """Append the lines of a text to the file, each after the current time."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = safe_output(text).rstrip("\n").split("\n")
        data = "".join(f"{now} {line}".rstrip() + "\n" for line in lines)
        with self._lock:
            if self._is_open:
                self._append(data.encode(errors="backslashreplace"))

    def close(self) -> None:
        """Ignore all further lines: libraries may keep a stream that writes to this log."""
        with self._lock:
            self._is_open = False

    def _append(self, data: bytes) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(data)
                size = file.tell()
            if size >= self._most_bytes:
                older = self._path.with_stem(f"{self._path.stem}-older")
                self._path.replace(older)
        except OSError as error:
            self._is_open = False
            tell(f"{self._path} cannot be written ({error.strerror}): the run goes on without it")


class Tee:
    """A text stream that also passes its lines to a function."""

    def __init__(self, stream: TextIO, add: Callable[[str], None]) -> None:
        self._stream = stream
        self._add = add
        self._lock = Lock()
        self._rest = ""

    def write(self, text: str) -> int:
        r"""Write the text to the stream, pass on complete lines, and return the stream's result.

        If a line is redrawn with `\r`, only its last state is passed on.
        """
        with self._lock:
            *lines, rest = (self._rest + text.replace("\r\n", "\n")).split("\n")
            self._rest = rest.rpartition("\r")[2]
        for line in lines:
            self._add(line.rpartition("\r")[2])
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def console_to(log: RunLog, out: TextIO, err: TextIO) -> Iterator[None]:
    """During the block, copy standard output and error into the log, besides `out` and `err`."""
    with (
        redirect_stdout(cast(TextIO, Tee(out, log.add))),
        redirect_stderr(cast(TextIO, Tee(err, log.add))),
    ):
        yield


LONGEST_LINE = 500
"""The most characters of a line that are returned."""
_TAIL_BYTES = 256 * 1024


def matches_from_the_end(path: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the text of the pattern's first group from each matching line, last line first.

    Only the tail of the log is searched. Yields nothing if there is no such file, as for a process
    on another node.
    """
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - _TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return
    for line in reversed(lines):
        if match := pattern.match(line):
            yield match[1][:LONGEST_LINE]
