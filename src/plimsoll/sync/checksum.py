"""Checksums of packed tensors, computed where the tensors lie.

On CPU a checksum is xxh3's 64 bits. A card computes a sum of the words (8 bytes each) times odd
factors that depend on the word's place, modulo 2^64: swapped, shifted and changed words all change
it. Such sums do not depend on their order, so every card gives the same one. The sum works on CPU,
too, but takes two to ten times as long as xxh3 (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
import xxhash
from torch import Tensor

from plimsoll.sync.price import CHECKSUM_BYTES

_ROWS_AT_ONCE = 4
"""Rows in one product; more would need more memory, fewer more kernels."""
_ROW = CHECKSUM_BYTES // (8 * (1 + _ROWS_AT_ONCE))
"""Words of a row: 2^18. Every row has the same factors, and rows have factors, too."""
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as splitmix64 has it; here as signed integers
_MIX = -4658895280553007687


def checksums(data: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return the checksum of each piece of a buffer, after at most one wait for the device.

    Args:
        data: a contiguous uint8 tensor, in which the pieces lie one behind the other.
        sizes: bytes of each piece, multiples of 8.
    """
    pieces = data.split([*sizes])
    if data.device.type == "cpu":
        return [xxhash.xxh3_64_intdigest(p.numpy()) for p in pieces]
    numbers: list[int] = torch.stack([weighted_sum(p.view(torch.int64)) for p in pieces]).tolist()
    return numbers


def hash_bytes(data: Tensor) -> str:
    """Return a fast hash (xxh3, 64 bits) of a contiguous tensor's bytes in host memory."""
    flat = data.flatten().view(torch.uint8).numpy()
    return xxhash.xxh3_64_hexdigest(flat)  # type: ignore[arg-type]  # numpy is a Buffer


def weighted_sum(words: Tensor) -> Tensor:
    """Return the checksum of int64 words as a card computes it, as a tensor of no dimensions."""
    sums = torch.cat([*_row_sums(words)])
    return (sums * _factors(len(sums), words.device)).sum()


def _row_sums(words: Tensor) -> Iterator[Tensor]:
    """Yield the sums of the rows times their words' factors; the last row may be short."""
    factors = _row_factors(words.device)
    full = len(words) // _ROW
    rows = words[: full * _ROW].view(full, _ROW)
    for first in range(0, full, _ROWS_AT_ONCE):
        yield (rows[first : first + _ROWS_AT_ONCE] * factors).sum(1)
    rest = words[full * _ROW :]
    yield (rest * factors[: len(rest)]).sum(0, keepdim=True)


@cache
def _row_factors(device: torch.device) -> Tensor:
    return _factors(_ROW, device)


def _factors(count: int, device: torch.device) -> Tensor:
    """Return odd numbers that look random, one for each place."""
    place = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _GOLDEN
    mixed = (place ^ (place >> 30)) * _MIX
    return (mixed ^ (mixed >> 27)) | 1
