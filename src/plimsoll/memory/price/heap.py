"""What the heap of a process on CPU keeps of memory that tensors have given back.

glibc takes a block of more than 32 MiB from the system and gives it back when it is freed; smaller
ones come from its heap, once one of their size has been freed (mallopt(3), M_MMAP_THRESHOLD, which
moves up to DEFAULT_MMAP_THRESHOLD_MAX). The heap shrinks from its top only, and what sits there
lasts: so it stays as large as it ever was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from plimsoll.memory.items import Held, Item, Moment

LARGEST_KEPT = 32 * 2**20  # bytes of a block
_SOURCE = "mallopt(3), M_MMAP_THRESHOLD; measured with mallinfo2(3)"


def small_bytes(size: int, block: int) -> int:
    """Of an item whose largest tensor has `block` bytes: those that the heap keeps."""
    return size if block < LARGEST_KEPT else 0


def kept_by_heap(held: Iterable[Held]) -> Iterator[Held]:
    """At each moment after the load: what the heap has at its fullest and does not need then.

    What is only there while weights are read was made by the loader's threads (transformers,
    core_model_loading.py), and a thread's heap serves no other. What is written at the end comes
    after all else, and leaves nothing behind.
    """
    everything = tuple(held)
    moments = {moment for one in everything for moment in one.moments if moment.phase != "load"}
    read = sum(one.item.small for one in everything if one.moments.isdisjoint(moments))
    live = {moment: _small(everything, moment) for moment in moments}
    most = max((size for moment, size in live.items() if moment.phase != "save"), default=0)
    for moment, size in live.items():
        yield Held(_item(read, max(most, size), size), frozenset({moment}))


def _small(held: Iterable[Held], moment: Moment) -> int:
    return sum(one.item.small for one in held if moment in one.moments)


def _item(read: int, most: int, live: int) -> Item:
    return Item(
        role="process",
        name="freed, kept by the heap",
        where="host",
        level="process",
        bytes=read + most - live,
        formula=f"{most:,} bytes of small tensors at most, {live:,} of them now; {read:,} by the "
        "loader's threads",
        source=_SOURCE,
    )
