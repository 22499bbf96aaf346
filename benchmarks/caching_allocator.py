"""A model of PyTorch's allocator of a card's memory, as far as it decides what is reserved.

From c10/cuda/CUDACachingAllocator.cpp: sizes are rounded up to 512 bytes. Blocks of at most 1 MiB
come from small segments, others from large ones. The smallest free block that is large enough
serves, and is cut; neighbours that are free are joined again. Where none is large enough, a new
segment is taken (fixed segments), or the last one grows by whole pages (growing segments). One
stream; nothing is given back while memory lasts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
_STEP = 512
_SMALL = MIB  # the largest block of a small segment
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB  # larger blocks have fixed segments of their own, in steps of 2 MiB


def up(size: int, step: int) -> int:
    """The next multiple."""
    return -(-size // step) * step


@dataclass(eq=False)
class Block:
    """A piece of a segment. before, after: its neighbours there."""

    size: int
    free: bool
    before: Block | None = None
    after: Block | None = None


@dataclass
class _Pool:
    """The segments of small blocks, or of large ones. free: sizes and blocks, smallest first. last:
    the end of the segment that grows."""

    page: int
    remainder: int
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    last: Block | None = None

    def put(self, block: Block) -> None:
        block.free = True
        insort(self.free, (block.size, id(block), block))

    def take(self, block: Block) -> Block:
        del self.free[bisect_left(self.free, (block.size, id(block)))]
        block.free = False
        return block

    def smallest(self, size: int) -> Block | None:
        """The smallest free block of at least this size."""
        place = bisect_left(self.free, (size, 0))
        return self.free[place][2] if place < len(self.free) else None


class CachingAllocator:
    """live, reserved: bytes; most_live, most_reserved: the highest that they have been."""

    def __init__(self, *, growing: bool) -> None:
        self._growing = growing
        self._pools = {
            True: _Pool(_SMALL_SEGMENT, _STEP),
            False: _Pool(_LARGE_SEGMENT, _STEP if growing else _SMALL + 1),
        }
        self._small: dict[Block, bool] = {}
        self.live = self.reserved = self.most_live = self.most_reserved = 0

    def allocate(self, size: int) -> Block:
        """A block for so many bytes."""
        size = up(max(size, 1), _STEP)
        small = size <= _SMALL
        pool = self._pools[small]
        block = pool.smallest(size)
        block = self._new(pool, size, small) if block is None else pool.take(block)
        if block.size - size >= pool.remainder:
            self._cut(pool, block, size)
        self._small[block] = small
        self.live += block.size
        self.most_live = max(self.most_live, self.live)
        return block

    def release(self, block: Block) -> None:
        """Join a block that is used no more with its free neighbours."""
        pool = self._pools[self._small.pop(block)]
        self.live -= block.size
        if block.after is not None and block.after.free:
            self._join(pool, block, pool.take(block.after))
        if block.before is not None and block.before.free:
            first = pool.take(block.before)
            self._join(pool, first, block)
            block = first
        pool.put(block)

    def _new(self, pool: _Pool, size: int, small: bool) -> Block:
        """A block of at least this size in memory that is taken from the card."""
        if not self._growing:
            own = not small and size >= _OWN_SEGMENT
            segment = up(size, _SMALL_SEGMENT) if own else pool.page
            self._reserve(segment)
            return Block(segment, free=False)
        last = pool.last
        if last is not None and last.free:
            more = up(size - last.size, pool.page)
            block = pool.take(last)
            block.size += more
        else:
            more = up(size, pool.page)
            block = Block(more, free=False, before=last)
            if last is not None:
                last.after = block
            pool.last = block
        self._reserve(more)
        return block

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _cut(self, pool: _Pool, block: Block, size: int) -> None:
        """Leave a block only its first bytes; the rest is free."""
        rest = Block(block.size - size, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        if pool.last is block:
            pool.last = rest
        pool.put(rest)

    def _join(self, pool: _Pool, first: Block, second: Block) -> None:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if pool.last is second:
            pool.last = first
