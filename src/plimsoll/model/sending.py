"""Copy a micro-batch's arrays to a device in one piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = Mapping[str, NDArray[Any] | None]

ALIGNMENT = 16
"""Bytes. Each array begins at a multiple, where every dtype and every vectorised kernel may."""


class Piece(NamedTuple):
    """An array's place in a buffer of bytes."""

    name: str
    array: NDArray[Any]
    start: int


def send(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Copy arrays (which may be read-only views of Ray's store) to a device; leave out each None.

    On its way to a card everything lies in one buffer of pinned memory and crosses in one copy, so
    that the host does not wait for what the card still has to do. PyTorch keeps the buffer until
    the copy is done (CachingHostAllocator). The tensors on the card are views of one block.
    """
    given = {name: array for name, array in arrays.items() if array is not None}
    if device.type != "cuda":
        return {name: torch.tensor(array, device=device) for name, array in given.items()}
    pieces, size = lay_out(given)
    # `torch.tensor` cannot pin what it makes of a NumPy array.
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    write(pieces, buffer)
    return dict(views(pieces, buffer.to(device, non_blocking=True)))


def send_one(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a single array to a device, as `send` does."""
    return send({"": array}, device)[""]


def lay_out(arrays: Mapping[str, NDArray[Any]]) -> tuple[list[Piece], int]:
    """Place arrays one behind the other; return the pieces and how many bytes hold them all."""
    pieces: list[Piece] = []
    size = 0
    for name, array in arrays.items():
        pieces.append(Piece(name, array, size))
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return pieces, size


def write(pieces: list[Piece], buffer: Tensor) -> None:
    """Copy the arrays to their places in a buffer (uint8) in host memory."""
    room = buffer.numpy()
    for _, array, start in pieces:
        place = room[start : start + array.nbytes].view(array.dtype)
        np.copyto(place.reshape(array.shape), array)


def views(pieces: list[Piece], buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each array's name and the tensor that views its place in a buffer on any device."""
    for name, array, start in pieces:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        yield name, buffer[start : start + array.nbytes].view(dtype).view(array.shape)
