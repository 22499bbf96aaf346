"""Copy a micro-batch's arrays to a device in one piece, and tensors to the host and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = Mapping[Any, NDArray[Any] | None]
"""Arrays by field or by column."""

ALIGNMENT = 16
"""Bytes; each array begins at a multiple, which every dtype and vectorised kernel accepts."""


def send(arrays: Arrays, device: torch.device) -> dict[Any, Tensor]:
    """Return arrays as tensors on a device, by their keys; None values are left out.

    The arrays may be read-only views of Ray's store. For a card, they are gathered in one buffer of
    pinned memory and cross in one copy, so the host does not wait for the card. PyTorch keeps the
    buffer until the copy is done (CachingHostAllocator). The tensors on the card are views of one
    block.
    """
    present = {name: array for name, array in arrays.items() if array is not None}
    if device.type != "cuda":
        return {name: torch.tensor(array, device=device) for name, array in present.items()}
    # `torch.tensor` cannot pin the copy of a NumPy array. A model may load under a default device.
    size = buffer_size(present)
    buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    for name, view in views(present, buffer):
        np.copyto(view.numpy(), present[name])
    return dict(views(present, buffer.to(device, non_blocking=True)))


def keep_on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory; for a card in pinned memory, and the host does not wait.

    Until the card has caught up, read the copy only by `to(device, non_blocking=True)` on the same
    stream, which comes after it.
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def buffer_size(arrays: Mapping[Any, NDArray[Any]]) -> int:
    """Return the size in bytes of a buffer for all arrays."""
    return sum(map(_aligned_size, arrays.values()))


def views(arrays: Mapping[Any, NDArray[Any]], buffer: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield each array's key and the tensor that views its place in a buffer on any device."""
    start = 0
    for name, array in arrays.items():
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        yield name, buffer[start : start + array.nbytes].view(dtype).view(array.shape)
        start += _aligned_size(array)


def _aligned_size(array: NDArray[Any]) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT
