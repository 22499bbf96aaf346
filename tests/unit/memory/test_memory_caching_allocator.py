"""benchmarks/caching_allocator.py: what PyTorch's allocator reserves, block by block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caching_allocator import CachingAllocator

MIB = 2**20


@pytest.mark.parametrize(
    ("growing", "size", "reserved"),
    [
        (False, 1, 2 * MIB),  # a small segment
        (False, 2 * MIB, 20 * MIB),  # a large one
        (False, 11 * MIB - 5, 12 * MIB),  # one of its own, in steps of 2 MiB
        (True, 1, 2 * MIB),  # by pages
        (True, 11 * MIB, 20 * MIB),
        (True, 41 * MIB, 60 * MIB),
    ],
)
def test_a_block_takes_a_segment(growing: bool, size: int, reserved: int) -> None:
    allocator = CachingAllocator(growing=growing)
    allocator.allocate(size)
    assert allocator.reserved == reserved


def test_fixed_segments_that_are_a_little_too_small_are_of_no_use() -> None:
    """Free ones of 40 and 42 MiB do not hold 44; one that has grown to 60 does."""
    reserved = {}
    for growing in (False, True):
        allocator = CachingAllocator(growing=growing)
        for size in (40, 42, 44):
            allocator.release(allocator.allocate(size * MIB))
        reserved[growing] = allocator.reserved
        assert allocator.most_live == 44 * MIB and allocator.live == 0
    assert reserved == {False: (40 + 42 + 44) * MIB, True: 60 * MIB}


def test_a_free_block_is_cut_and_joined_again() -> None:
    allocator = CachingAllocator(growing=False)
    allocator.release(allocator.allocate(40 * MIB))
    parts = [allocator.allocate(20 * MIB) for _ in range(2)]
    assert allocator.reserved == 40 * MIB
    for part in parts:
        allocator.release(part)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 40 * MIB


def test_the_smallest_block_that_is_large_enough_serves() -> None:
    allocator = CachingAllocator(growing=False)
    free = [allocator.allocate(size * MIB) for size in (60, 40)]
    for block in free:
        allocator.release(block)
    allocator.allocate(40 * MIB)  # of the second, so that the first is whole
    allocator.allocate(60 * MIB)
    assert allocator.reserved == 100 * MIB


@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(MIB + 1, 64 * MIB), st.integers(0, 9)), min_size=1, max_size=60),
)
def test_no_byte_is_lost_or_given_twice(growing: bool, asked: list[tuple[int, int]]) -> None:
    """Each block is large enough, all of them fit into what is reserved, and once all are released
    all that grew is one block."""
    allocator, held = CachingAllocator(growing=growing), []
    for size, index in asked:
        held.append(allocator.allocate(size))
        assert held[-1].size >= size
        if index < len(held):
            allocator.release(held.pop(index))
        assert allocator.live == sum(block.size for block in held) <= allocator.reserved
    for block in held:
        allocator.release(block)
    reserved = allocator.reserved
    assert allocator.live == 0 and reserved == allocator.most_reserved
    if growing:
        assert allocator.allocate(reserved).size == allocator.reserved == reserved
