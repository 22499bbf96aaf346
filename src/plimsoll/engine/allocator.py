"""The allocator of this process's card memory; see machine/allocator.py."""

from __future__ import annotations

import torch

from plimsoll.machine.allocator import user_settings, with_segments


def expand_segments(expandable: bool) -> None:
    """Take memory in segments that grow from now on, or in fixed ones, in this process.

    Memory that it has already stays as it is. CUDA IPC needs fixed segments for what it shares. The
    user's other settings are set again: PyTorch drops every setting that a change leaves out.
    """
    torch._C._accelerator_setAllocatorSettings(with_segments(user_settings(), expandable))
