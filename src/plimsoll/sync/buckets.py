"""Buckets of weights: tensors packed one behind the other, each with a checksum of its bytes.

A rank packs and ships a bucket; in each process of an engine, whichever engine it is, a
`WeightLanding` takes it and compares the checksums.

Checksums are computed where the tensors lie. On CPU a checksum is xxh3's 64 bits. A card computes a
sum of the words (8 bytes each) times odd factors that depend on the word's place, modulo 2^64:
swapped, shifted and changed words all change it. Such sums do not depend on their order, so every
card gives the same one. The sum works on CPU, too, but takes two to ten times as long as xxh3
(docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import xxhash
from torch import Tensor

from plimsoll.errors import WeightSyncError
from plimsoll.machine.faults import fault_value
from plimsoll.run.numbers import plural
from plimsoll.sync.channel import Channel, Handle, Inlet, Outlet, card_name, open_inlet
from plimsoll.sync.price import CHECKSUM_BYTES

_ROWS_AT_ONCE = 4
"""Rows in one product; more would need more memory, fewer more kernels."""
_ROW = CHECKSUM_BYTES // (8 * (1 + _ROWS_AT_ONCE))
"""Words of a row: 2^18. Every row has the same factors, and rows have factors, too."""
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as splitmix64 has it; here as signed integers
_MIX = -4658895280553007687
_NO_FACTORS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class SentTensor:
    """One tensor of a bucket: Hugging Face name, dtype, shape, size, and checksum of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    checksum: int


@dataclass(frozen=True)
class WeightBucket:
    """Undivided tensors, packed one behind the other, each from a multiple of 8 bytes on.

    Attributes:
        tensors: the tensors in their order.
        bytes: bytes of all together.
        handle: what an `Inlet` opens to get these bytes.
    """

    tensors: tuple[SentTensor, ...]
    bytes: int
    handle: Handle


def rebuild_bucket(values: Sequence[Any]) -> WeightBucket:
    """Return the bucket whose `astuple` was posted: its tuples come back as lists."""
    tensors, size, handle = values
    sent = (SentTensor(n, dtype, tuple(shape), *rest) for n, dtype, shape, *rest in tensors)
    return WeightBucket(tuple(sent), size, tuple(handle))


def ship_bucket(
    tensors: Mapping[str, Tensor], outlet: Outlet, factors: Mapping[str, float] = _NO_FACTORS
) -> WeightBucket:
    """Pack these tensors (by Hugging Face name) into the outlet's room, ship and post them.

    `factors`: by what some of them are multiplied on the way.
    """
    rooms = [packed_bytes(t.nbytes) for t in tensors.values()]
    data = outlet.room(sum(rooms))
    for (name, tensor), piece in zip(tensors.items(), data.split(rooms), strict=True):
        piece[tensor.nbytes :].zero_()
        packed = piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        if name in factors:
            packed.mul_(factors[name])
    sent = tuple(
        SentTensor(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.nbytes, checksum)
        for (name, t), checksum in zip(tensors.items(), checksums(data, rooms), strict=True)
    )
    bucket = WeightBucket(sent, len(data), outlet.ship())
    outlet.post(astuple(bucket))
    return bucket


def sum_pieces(tensors: Sequence[SentTensor], data: Tensor) -> list[int]:
    """Return the checksum of each tensor that is packed in a uint8 tensor."""
    return checksums(data, [packed_bytes(sent.bytes) for sent in tensors])


def split_bytes(tensors: Sequence[SentTensor], data: Tensor) -> dict[str, Tensor]:
    """Return the tensors that are packed in a uint8 tensor: views into it, by name."""
    pieces: dict[str, Tensor] = {}
    offset = 0
    for sent in tensors:
        piece = data[offset : offset + sent.bytes]
        pieces[sent.name] = piece.view(getattr(torch, sent.dtype)).view(sent.shape)
        offset += packed_bytes(sent.bytes)
    return pieces


def packed_bytes(size: int) -> int:
    """Return the size rounded up to a multiple of 8 bytes, at which any dtype may begin."""
    return -(-size // 8) * 8


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


class Arrivals:
    """The tensors that one weight sync announced, and which of them have come."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._missing = set(names)

    def take(self, tensors: Sequence[SentTensor], arrived: Sequence[int] | None) -> None:
        """Check the tensors of a bucket that came, and note them.

        Args:
            tensors: the tensors as they were sent.
            arrived: the checksums of what came; None if another process of the engine, which reads
                the same memory, checks it.

        Raises:
            WeightSyncError: one was not announced, came twice, or its bytes are not those sent.
        """
        for number, sent in enumerate(tensors):
            if sent.name not in self._missing:
                raise WeightSyncError(f"{sent.name} came twice, or was never announced")
            if arrived is not None and arrived[number] != sent.checksum:
                raise WeightSyncError(
                    f"{sent.name} arrived damaged: checksum {arrived[number]:x}, but "
                    f"{sent.checksum:x} was sent"
                )
            self._missing.remove(sent.name)

    def complete(self) -> None:
        """Raise WeightSyncError if announced tensors have not come."""
        if self._missing:
            first = ", ".join(sorted(self._missing)[:5])
            raise WeightSyncError(
                f"{plural(len(self._missing), 'tensor')} of the new weights never arrived: "
                f"{first}. The engine would go on with the old ones and sample from no version at "
                "all"
            )


class WeightLanding:
    """The receiving end of a run's syncs, with what the present one announced.

    Args:
        number: the number of the process among those of all engines, from 1.
        device: the engine's device.
        is_first: whether this is the first process of its engine. If all of them read the same
            memory, only the first checks it.
    """

    def __init__(self, number: int, device: torch.device, *, is_first: bool = True) -> None:
        self._number, self._device, self._is_first = number, device, is_first
        self._arrivals = Arrivals(())
        self._opened: tuple[Channel, Inlet] | None = None

    def begin(self, names: tuple[str, ...], channels: Iterable[Channel]) -> None:
        """Expect these tensors by one of the channels, which stays open for further syncs.

        `channels` has one of each rank that sends; all send the same.

        Raises:
            WeightSyncError: none of them reaches this process.
        """
        self._arrivals = Arrivals(names)
        card = card_name(self._device)
        channel = next((c for c in channels if c.card in ("", card)), None)
        if channel is None:
            raise WeightSyncError("no training rank sends weights from this process's card")
        if self._opened is None or self._opened[0] != channel:
            self._opened = channel, open_inlet(channel, self._number, self._device)

    @contextmanager
    def bucket(self) -> Iterator[tuple[WeightBucket, Tensor]]:
        """Wait for the next bucket; yield it, and its bytes, for use in the block only.

        Raises:
            WeightSyncError: see `Arrivals.take`; or the transfer was broken off.
        """
        inlet = self._inlet
        bucket = rebuild_bucket(inlet.next())
        data = fault_value("engine.receive", inlet.open(bucket.handle, bucket.bytes))
        checks = self._is_first or not inlet.one_copy
        self._arrivals.take(bucket.tensors, sum_pieces(bucket.tensors, data) if checks else None)
        yield bucket, data
        if data.is_cuda:  # the sender fills the buffer anew as soon as it is released
            torch.cuda.current_stream(data.device).synchronize()
        inlet.release()

    def complete(self) -> None:
        """Raise WeightSyncError if announced tensors have not come."""
        self._arrivals.complete()

    def close(self) -> None:
        """Let go of the sender's memory until the next sync."""
        self._inlet.close()

    @property
    def _inlet(self) -> Inlet:
        assert self._opened is not None, "a sync that has not begun"
        return self._opened[1]
