"""The file `run.log`: what a run shows on the console, line by line, with times."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from threading import Lock
from typing import Any, TextIO, cast

from plimsoll.run.output import tell

MOST_BYTES = 10 * 2**20
"""Size at which the file is renamed, replacing the one that was renamed before."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""Colours and cursor movements of a terminal."""


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
        """Append the lines of a text, each with the time."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = _ESCAPES.sub("", text).rstrip("\n").split("\n")
        data = "".join(f"{now} {line}".rstrip() + "\n" for line in lines)
        with self._lock:
            if self._is_open:
                self._append(data.encode(errors="backslashreplace"))

    def close(self) -> None:
        """Accept no more lines: libraries may keep a stream that writes here."""
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
        r"""Write the text; of a line that is redrawn by `\r`, only the last state is passed on."""
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
    """Copy what the block prints to the standard streams into the log."""
    with (
        redirect_stdout(cast(TextIO, Tee(out, log.add))),
        redirect_stderr(cast(TextIO, Tee(err, log.add))),
    ):
        yield
