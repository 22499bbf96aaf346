"""Tensors of one kind that a role keeps on one rank, whatever framework keeps them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from plimsoll.timeline.items import Allocation, Item, Kind, Moment, Where
from plimsoll.timeline.lifetimes import Life, TrainPhase, lifetime


@dataclass(frozen=True)
class Tensors:
    """Tensors of one kind on one rank.

    elements: of the whole role, or of the buffer. each: bytes of one; not whole where scales come
        with a block of elements. ranks: over how many they are divided.
    pinned: elements of each block of page-locked host memory (0: ordinary memory); PyTorch's
        allocator rounds every block up to a power of two.
    of: what the elements are, for the formula.
    """

    kind: Kind
    name: str
    of: str
    elements: int
    each: float
    source: str
    ranks: int = 1
    where: Where = "device"
    life: Life = "always"
    pinned: int = 0

    @property
    def bytes(self) -> int:
        """On one rank, with the rounding of pinned blocks."""
        share = -(-self.elements // self.ranks)
        if not self.pinned:
            return math.ceil(share * self.each)
        whole, rest = divmod(share, self.pinned)
        return whole * pinned_block(math.ceil(self.pinned * self.each)) + pinned_block(
            math.ceil(rest * self.each)
        )

    @property
    def formula(self) -> str:
        """In words, with the numbers put in."""
        text = f"{self.each:g} bytes x {self.elements:,} {self.of}"
        if self.ranks > 1:
            text += f" / {self.ranks} ranks"
        return f"{text}, pinned blocks rounded up to powers of two" if self.pinned else text


def state_items(
    role: str, kept: Iterable[Tensors], phase: TrainPhase | None, moments: frozenset[Moment]
) -> Iterator[Allocation]:
    """A role's tensors with the moments at which each exists; what is empty is left out.

    phase: the one that trains it; None for a frozen role. moments: all of the job's.
    """
    for one in kept:
        if one.elements:
            kind = one.kind if phase else "frozen models"
            size, formula = one.bytes, one.formula
            item = Item(role, kind, one.name, one.where, "allocated", size, formula, one.source)
            yield Allocation(item, lifetime(one.life, role, phase, moments))


def pinned_block(size: int) -> int:
    """What PyTorch's allocator of page-locked memory takes for a block of `size` bytes: the next
    power of two (ATen/core/CachingHostAllocator.h, `allocate`)."""
    return 0 if size == 0 else 1 << (size - 1).bit_length()
