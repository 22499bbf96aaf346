"""How far a long count is: a bar on a terminal, elsewhere a line at every tenth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int], None]


@contextmanager
def counting(what: str, total: int, stream: TextIO) -> Iterator[Advance]:
    """Within: a function that takes how many more are done."""
    if stream.isatty() and not (console := Console(file=stream)).is_dumb_terminal:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(what, total=total)
            yield lambda more: progress.advance(task, more)
        return
    yield _Lines(what, total, stream)


class _Lines:
    def __init__(self, what: str, total: int, stream: TextIO) -> None:
        self._what, self._total, self._stream = what, total, stream
        self._done = 0

    def __call__(self, more: int) -> None:
        before, self._done = self._done, self._done + more
        if before * 10 // self._total < self._done * 10 // self._total:
            print(f"{self._what} {self._done}/{self._total}", file=self._stream, flush=True)
