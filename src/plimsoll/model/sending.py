"""Copy a micro-batch's arrays to a device in one piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = Mapping[str, NDArray[Any] | None]

ALIGNMENT = 16
"""Bytes; each array begins at a multiple, which every dtype and vectorised kernel accepts."""


def send(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Copy arrays (which may be read-only views of Ray's store) to a device; leave out each None.

    On its way to a card everything lies in one buffer of pinned memory and crosses in one copy, so
    that the host does not wait for what the card still has to do. PyTorch keeps the buffer until
    the copy is done (CachingHostAllocator). The tensors on the card are views of one block.
    """
    present = {name: array for name, array in arrays.items() if array is not None}
    if device.type != "cuda":
        return {name: torch.tensor(array, device=device) for name, array in present.items()}
    # `torch.tensor` cannot pin the copy of a NumPy array.
    buffer = torch.empty(buffer_size(present), dtype=torch.uint8, pin_memory=True)
    for name, view in views(present, buffer):
        np.copyto(view.numpy(), present[name])
    return dict(views(present, buffer.to(device, non_blocking=True)))


def send_one(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a single array to a device, as `send` does."""
    return send({"": array}, device)[""]


def buffer_size(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Return the bytes that hold all arrays one behind the other."""
    return sum(map(_aligned_size, arrays.values()))


def views(arrays: Mapping[str, NDArray[Any]], buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each array's name and the tensor that views its place in a buffer on any device."""
    start = 0
    for name, array in arrays.items():
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        yield name, buffer[start : start + array.nbytes].view(dtype).view(array.shape)
        start += _aligned_size(array)


def _aligned_size(array: NDArray[Any]) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT
