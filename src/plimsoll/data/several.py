"""Make parts of many rows in several processes, in the rows' order.

Few rows are made in this process alone, since a process that tokenizes takes seconds to start. The
rows are read here; what becomes of them does not depend on the number of processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import chain, islice
from typing import Any, TypeVar

from plimsoll.errors import PlimsollError
from plimsoll.process.child import ChildEnded, Pool, Program, our_environment

ROWS_AT_ONCE = 256
"""Rows of one part. It is small so that a count moves even if rows are slow, as LaTeX is."""
ROWS_ALONE = 64 * ROWS_AT_ONCE
"""Rows that are made in this process before others are started."""
MOST_PROCESSES = 16
"""The most processes by default: more would wait for this process to read the rows."""
_WHAT = "A process that tokenises rows"
_PART_SECONDS = 1e6  # a user's tokenizer may be slow

RowT = TypeVar("RowT")
PartT = TypeVar("PartT")
MakePart = Callable[[Sequence[RowT], int], PartT]
"""Takes rows and the number of the first of them."""


def make_parts(
    rows: Iterable[RowT], make: MakePart[RowT, PartT], processes: int
) -> Iterator[tuple[Sequence[RowT], PartT]]:
    """Yield the rows, some at a time, and what `make` makes of them.

    With several processes, `make` and all that it returns can be pickled.
    """
    parts = _numbered(iter(rows))
    alone = None if processes == 1 else ROWS_ALONE // ROWS_AT_ONCE
    for part, first in islice(parts, alone):
        yield part, make(part, first)
    if (following := next(parts, None)) is None:
        return
    environment = {**our_environment(), "TOKENIZERS_PARALLELISM": "false"}
    program = Program(open_rows, _WHAT, make, codec="pickle", environment=environment)
    with (
        ThreadPoolExecutor(processes) as threads,
        closing(Pool(program, processes)) as pool,  # closed first, so that no thread waits on
    ):
        waiting: deque[tuple[Sequence[RowT], Future[Any]]] = deque()
        for part, first in chain([following], parts):
            waiting.append((part, threads.submit(pool.ask, (part, first), _PART_SECONDS)))
            if len(waiting) > 2 * processes:
                yield _result(*waiting.popleft())
        while waiting:
            yield _result(*waiting.popleft())


def _numbered(rows: Iterator[RowT]) -> Iterator[tuple[Sequence[RowT], int]]:
    """Yield the rows in parts, each with the number of its first row."""
    first = 0
    while part := list(islice(rows, ROWS_AT_ONCE)):
        yield part, first
        first += len(part)


def _result(rows: Sequence[RowT], future: Future[Any]) -> tuple[Sequence[RowT], Any]:
    try:
        part = future.result()
    except ChildEnded as ended:
        raise PlimsollError(f"{_WHAT} {ended}\n{ended.lines}".rstrip()) from ended
    if isinstance(part, PlimsollError):
        raise part
    return rows, part


def open_rows(make: MakePart[Any, Any]) -> Callable[[Any], Any]:
    """Return the function that makes a part, in a process of its own; an error is its answer."""

    def answer(message: tuple[Sequence[Any], int]) -> Any:
        try:
            return make(*message)
        except PlimsollError as error:
            return error

    return answer
