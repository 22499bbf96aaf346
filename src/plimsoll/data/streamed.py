"""Items of a source that is larger than a disk: made as a run reaches them, and not kept.

The rows come in blocks, in the order of the files and again from the first one on. A block is read
and tokenised as a whole, and its items are drawn in a permutation of their own. So item j of the
stream depends only on the rows and the seed. To reach it once more, the numbers of items in the
blocks before it must be known, which are noted in a file: then those blocks are read, which is
quick, and not tokenised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from plimsoll.data.order import ENDLESS
from plimsoll.data.stored import StoredRows, part_of
from plimsoll.errors import ConfigError, DataError
from plimsoll.records import Ints
from plimsoll.run.files import append_whole, write_whole
from plimsoll.run.numbers import plural

BLOCK_ROWS = 4096
"""Rows of a block: they are in memory, and among them items are shuffled."""

T = TypeVar("T", covariant=True)
RowT = TypeVar("RowT")


def read_blocks(read: Callable[[], Iterator[RowT]]) -> Iterator[list[RowT]]:
    """Yield blocks of rows without end; `read` returns the rows of the source from the first on.

    A source without rows gives one block without rows. Raises DataError if it has none any more.
    """
    for number in count():
        rows = read()
        block = list(islice(rows, BLOCK_ROWS))
        if number and not block:
            raise DataError("a stream's source had rows, and has none any more")
        yield block
        while block := list(islice(rows, BLOCK_ROWS)):
            yield block


@dataclass(frozen=True)
class BlockCounts:
    """A file with the number of items of each block of a run's streams.

    Attributes:
        path: The file, of JSON lines.
        key: The key of the source in the config.
    """

    path: Path
    key: str

    def read(self) -> list[int]:
        """Return the counts of the source's first blocks; cut a line that was not written whole."""
        if not self.path.is_file():
            return []
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            write_whole(self.path, whole)
        rows = map(json.loads, whole.splitlines())
        counts = {row["block"]: row["items"] for row in rows if row["source"] == self.key}
        known = (counts.get(number) for number in count())
        return [*iter(lambda: next(known), None)]

    def add(self, block: int, items: int) -> None:
        """Write down the number of items of a block."""
        row = {"source": self.key, "block": block, "items": items}
        append_whole(self.path, json.dumps(row).encode() + b"\n")


class StreamedRows(StoredRows[T]):
    """The endless items of a stream. Its table is that of the first block.

    Items are best asked for in their order: an earlier block is made anew.
    """

    def __init__(
        self,
        first: StoredRows[T],
        read: Callable[[], Iterator[Any]],
        make: Callable[[Sequence[Any]], Sequence[T]],
    ) -> None:
        """Hold the first block.

        Args:
            first: the items of the first block.
            read: returns the rows from the first one on.
            make: returns the items of a block.
        """
        self.table, self.fingerprint = first.table, first.fingerprint
        self._first, self._read, self._make = first, read, make
        self._seed: Sequence[int] | None = None
        self._noted: BlockCounts | None = None
        self._ends: list[int] = []
        self._go_back()

    def begin(self, seed: Sequence[int] | None, noted: BlockCounts) -> None:
        """Set how items are drawn.

        Args:
            seed: of the permutations; None draws items as they come.
            noted: the counts of blocks that the run has seen before.
        """
        self._seed, self._noted, self._ends = seed, noted, [*accumulate(noted.read())]
        self._go_back()

    def __len__(self) -> int:
        return ENDLESS

    def item(self, place: int) -> T:
        """Return the item of a place, after opening its block."""
        while place >= (self._ends[-1] if self._ends else 0):
            self._open(len(self._ends))
        number, within = part_of(self._ends, place)
        if number != self._number:
            self._open(number)
        return self._items[int(self._order[within])]

    def _begin_of(self, number: int) -> int:
        """Return the number of items in the blocks before one."""
        return self._ends[number - 1] if number else 0

    def _go_back(self) -> None:
        """Go to the first block, which has been made."""
        self._blocks = read_blocks(self._read)
        self._take(0, self._first)

    def _open(self, number: int) -> None:
        """Go to a block, and make its items."""
        if number <= self._number:
            self._go_back()
        if number > self._number:
            # Block 0 was not read from `_blocks`.
            passed = number - self._number - (self._number > 0)
            self._take(number, self._make(next(islice(self._blocks, passed, None))))

    def _take(self, number: int, items: Sequence[T]) -> None:
        """Have items of a block, in the order in which they are drawn; note how many are new."""
        if number < len(self._ends):
            before = self._ends[number] - self._begin_of(number)
            if before != len(items):
                key = "a stream" if self._noted is None else self._noted.key
                raise ConfigError(
                    f"{key}: block {number} of its rows gives {plural(len(items), 'item')} now, "
                    f"and gave {before:,} when it was drawn from: its files or settings are "
                    "others. Which rows come next is not known: use those of before, or begin a "
                    "new run"
                )
        self._number, self._items = number, items
        self._order: Ints = np.arange(len(items))
        if self._seed is not None:
            keys = np.random.PCG64([*self._seed, number]).random_raw(len(items))
            self._order = np.argsort(keys, kind="stable")
        if number == len(self._ends):
            if self._noted is not None:
                self._noted.add(number, len(items))
            self._ends.append(self._begin_of(number) + len(items))
