"""Buckets of weights: tensors packed one behind the other, each with a checksum of its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from plimsoll.sync.channel import Handle, Outlet
from plimsoll.sync.checksum import checksums

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
    """Return the bucket whose `astuple` came as lists, as vLLM sends values to its processes."""
    tensors, size, handle = values
    sent = (SentTensor(n, dtype, tuple(shape), *rest) for n, dtype, shape, *rest in tensors)
    return WeightBucket(tuple(sent), size, tuple(handle))


def ship_bucket(
    tensors: Mapping[str, Tensor], outlet: Outlet, factors: Mapping[str, float] = _NO_FACTORS
) -> WeightBucket:
    """Pack these tensors (by Hugging Face name) into the outlet's room, and ship them.

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
    return WeightBucket(sent, len(data), outlet.ship())


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
