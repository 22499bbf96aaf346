"""How processes meet: stores in which they find one another, and card memory that they share."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from plimsoll.machine.host import own_address
from plimsoll.machine.local_host import expands, user_settings, with_segments

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others, in a store or a collective. NCCL's own 10 minutes are too
short if a rank reads a large model from a slow disk, and engines may wake from sleep first."""


def serve_store(address: str, port: int = 0, ranks: int | None = None) -> TCPStore:
    """Return a store that this process serves at one address of the machine.

    TCPStore by itself listens at all addresses. A store asks nobody for a key: whoever reaches it
    can change what the ranks tell one another.

    Args:
        address: The address at which other ranks look for the store.
        port: Its port; 0 for a free one.
        ranks: How many ranks to wait for; None to wait for none.
    """
    own = own_address(address)
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.create_server((own, port), family=family) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            own,
            port,
            ranks,
            is_master=True,
            timeout=PATIENCE,
            wait_for_workers=ranks is not None,
            master_listen_fd=os.dup(listening.fileno()),  # the store closes it
        )


def find_store(address: str, port: int, ranks: int | None = None) -> TCPStore:
    """Return a connection to a store that another process, or this one, serves."""
    return TCPStore(address, port, ranks, is_master=False, timeout=PATIENCE)


def expand_segments(expandable: bool) -> None:
    """Let torch's CUDA allocator make expandable segments from now on, or fixed ones.

    Segments that the process already has stay as they are. Memory shared by CUDA IPC needs fixed
    segments. The user's other settings are set again: PyTorch drops every setting that a change
    leaves out.
    """
    bindings: Any = torch._C
    change = getattr(bindings, "_accelerator_setAllocatorSettings", None)
    change = change or torch.cuda.memory._set_allocator_settings  # of a torch without that name
    change(with_segments(user_settings(), expandable))


@contextmanager
def fixed_segments(device: torch.device) -> Iterator[None]:
    """During the block, let torch's CUDA allocator make fixed segments only, as CUDA IPC needs."""
    if device.type == "cpu":
        yield
        return
    expand_segments(False)
    try:
        yield
    finally:
        expand_segments(not user_settings() or expands(user_settings()))
