"""Tensors of one kind that a role keeps on one rank, in any framework."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from plimsoll.timeline.items import Allocation, Item, Kind, Moment, Where
from plimsoll.timeline.lifetimes import Life, TrainPhase, lifetime


@dataclass(frozen=True)
class Tensors:
    """Tensors of one kind on one rank.

    Attributes:
        of: the name of the elements in the formula.
        elements: elements of the whole role, or of the buffer.
        each: bytes of an element; not whole if scales come with a block of elements.
        source: the origin of the numbers.
        ranks: the number of ranks that share the elements.
        pinned: elements of each block of page-locked host memory (0: ordinary memory); PyTorch's
            allocator rounds every block up to a power of two.
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
        """The bytes on one rank, with the rounding of pinned blocks."""
        share = -(-self.elements // self.ranks)
        if not self.pinned:
            return math.ceil(share * self.each)
        whole, rest = divmod(share, self.pinned)
        return whole * pinned_block(math.ceil(self.pinned * self.each)) + pinned_block(
            math.ceil(rest * self.each)
        )

    @property
    def formula(self) -> str:
        """The calculation of the bytes, in words and numbers."""
        text = f"{self.each:g} bytes x {self.elements:,} {self.of}"
        if self.ranks > 1:
            text += f" / {self.ranks} ranks"
        return f"{text}, pinned blocks rounded up to powers of two" if self.pinned else text


def state_items(
    role: str, kept: Iterable[Tensors], phase: TrainPhase | None, moments: frozenset[Moment]
) -> Iterator[Allocation]:
    """Yield a role's tensors with the moments at which each exists; empty tensors are left out.

    `phase` trains the role (None for a frozen role); `moments` are all moments of the job.
    """
    for tensors in kept:
        if tensors.elements:
            kind = tensors.kind if phase else "frozen models"
            size = (tensors.bytes, tensors.formula, tensors.source)
            item = Item(role, kind, tensors.name, tensors.where, "allocated", *size)
            yield Allocation(item, lifetime(tensors.life, role, phase, moments))


def pinned_block(size: int) -> int:
    """Return the bytes that PyTorch takes for a block of page-locked memory: the next power of two.

    See ATen/core/CachingHostAllocator.h, `allocate`.
    """
    return 0 if size == 0 else 1 << (size - 1).bit_length()
