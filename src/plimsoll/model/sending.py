"""Arrays on their way from the host to the device that computes."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of an array (which may be a read-only view of Ray's store) on a device.

    On its way to a card it lies in pinned memory, so that the host does not wait until the card has
    done all that it was given before: it prepares the next micro-batch meanwhile. PyTorch keeps
    such memory until the copy is there.
    """
    if device.type != "cuda":
        return torch.tensor(array, device=device)
    return torch.tensor(array, pin_memory=True).to(device, non_blocking=True)
