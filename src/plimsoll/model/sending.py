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
"""Bytes; each array begins at a multiple, which every dtype and vectorised kernel accepts."""


class BufferPlace(NamedTuple):
    """An array and its start in a buffer of bytes."""

    name: str
    array: NDArray[Any]
    start: int


def send(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Copy arrays (which may be read-only views of Ray's store) to a device; leave out each None.

    On its way to a card everything lies in one buffer of pinned memory and crosses in one copy, so
    that the host does not wait for what the card still has to do. PyTorch keeps the buffer until
    the copy is done (CachingHostAllocator). The tensors on the card are views of one block.
    """
    present = {name: array for name, array in arrays.items() if array is not None}
    if device.type != "cuda":
        return {name: torch.tensor(array, device=device) for name, array in present.items()}
    places, size = lay_out(present)
    # `torch.tensor` cannot pin the copy of a NumPy array.
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    write(places, buffer)
    return dict(views(places, buffer.to(device, non_blocking=True)))


def send_one(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a single array to a device, as `send` does."""
    return send({"": array}, device)[""]


def lay_out(arrays: Mapping[str, NDArray[Any]]) -> tuple[list[BufferPlace], int]:
    """Place arrays one behind the other; return the places and the bytes that hold them all."""
    places: list[BufferPlace] = []
    size = 0
    for name, array in arrays.items():
        places.append(BufferPlace(name, array, size))
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return places, size


def write(places: list[BufferPlace], buffer: Tensor) -> None:
    """Copy the arrays to their places in a buffer (uint8) in host memory."""
    buffer_bytes = buffer.numpy()
    for _, array, start in places:
        place = buffer_bytes[start : start + array.nbytes].view(array.dtype)
        np.copyto(place.reshape(array.shape), array)


def views(places: list[BufferPlace], buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each array's name and the tensor that views its place in a buffer on any device."""
    for name, array, start in places:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        yield name, buffer[start : start + array.nbytes].view(dtype).view(array.shape)
