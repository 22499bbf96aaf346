"""Checksums of packed tensors: what a card computes, here on the CPU, and what the CPU does."""

from __future__ import annotations

import pytest
import torch
import xxhash
from torch import Tensor

from plimsoll.sync.buckets import checksums, weighted_sum

ROW = 2**18
MASK = 2**64 - 1


def words(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator)


def factor(place: int) -> int:
    """splitmix64's way of mixing, with shifts that keep the sign."""

    def signed(value: int) -> int:
        value &= MASK
        return value - 2**64 if value >> 63 else value

    mixed = signed((place + 1) * 0x9E3779B97F4A7C15)
    mixed = signed((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9)
    return mixed ^ (mixed >> 27) | 1


def test_it_is_the_sum_of_words_times_factors_of_their_place_and_row() -> None:
    data = words(2 * ROW + 3)
    places = [0, 1, 7, ROW - 1, ROW, ROW + 5, 2 * ROW, 2 * ROW + 2]
    for place in places:
        alone = torch.zeros_like(data)
        alone[place] = data[place]
        expected = int(data[place]) * factor(place % ROW) * factor(place // ROW)
        assert int(weighted_sum(alone)) & MASK == expected & MASK


@pytest.mark.parametrize("count", [0, 1, 5, ROW, ROW + 1, 6 * ROW + 9])
def test_any_length_is_summed_whole(count: int) -> None:
    data = words(count)
    parts = [weighted_sum(torch.where(torch.arange(count) % 3 == i, data, 0)) for i in range(3)]
    assert int(weighted_sum(data)) & MASK == sum(map(int, parts)) & MASK


@pytest.mark.parametrize("bit", [0, 1, 31, 62, 63])
@pytest.mark.parametrize("place", [0, 17, ROW, 4 * ROW + 5])
def test_one_bit_changes_it(bit: int, place: int) -> None:
    data = words(5 * ROW)
    before = int(weighted_sum(data))
    data[place] ^= -(2**63) if bit == 63 else 1 << bit
    assert int(weighted_sum(data)) != before


def test_swapped_shifted_and_repeated_values_change_it() -> None:
    data = words(3 * ROW)
    swapped, rows = data.clone(), data.view(3, ROW)
    swapped[[3, 9]] = data[[9, 3]]
    altered = [swapped, data.roll(1), data.roll(ROW), rows.flip(0).flatten(), -data]
    sums = {int(weighted_sum(one)) for one in [data, *altered]}
    assert len(sums) == 1 + len(altered)


def test_each_piece_of_a_buffer_has_its_own() -> None:
    data = words(40).view(torch.uint8)
    sizes = [8, 0, 240, 72]
    expected = [xxhash.xxh3_64_intdigest(p.numpy().tobytes()) for p in data.split(sizes)]
    assert checksums(data, sizes) == expected
    assert checksums(data[:0], []) == []
