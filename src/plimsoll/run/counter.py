"""How far a long count is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int], None]
"""Takes how many more are done."""

LINE_EVERY = 100_000
"""Of a count whose end is not known."""


@contextmanager
def counting(what: str, total: int, stream: TextIO) -> Iterator[Advance]:
    """Show a count while the block goes on."""
    if stream.isatty() and not (console := Console(file=stream)).is_dumb_terminal:
        bar, advance = count_bar(what, total, console)
        with bar:
            yield advance
        return
    yield count_lines(what, total, lambda line: print(line, file=stream, flush=True))


def count_bar(what: str, total: int | None, console: Console) -> tuple[Progress, Advance]:
    """A bar to show, and what moves it on. total: None where it is not known."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console)
    return bar, partial(bar.advance, bar.add_task(what, total=total))


def count_lines(what: str, total: int | None, say: Callable[[str], None]) -> Advance:
    """What says a line at every tenth, or where the total is not known at every `LINE_EVERY`."""
    lines, counted = (1, LINE_EVERY) if total is None else (10, total)
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        before, done = done, done + more
        if before * lines // counted < done * lines // counted:
            say(f"{what} {done:,}" if total is None else f"{what} {done}/{total}")

    return advance
