"""Keep the inputs of checkpointed layers in pinned host memory until the backward pass."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True, eq=False)
class OnHost:
    """A tensor that was copied to the host."""

    values: Tensor
    """Its values, in host memory."""

    device: torch.device
    """The device that it came from."""


class InputsOnHost:
    """Moves the tensors that autograd saves in layers from the card to the host, and back.

    An input is copied on a stream of its own, while its layer computes. The host never waits. The
    card waits until the copy of the input before is done, so at most two are on it: the one that a
    layer reads and the one that is being copied. An input is released only when the computing
    stream is behind its copy, so the allocator may give its memory to that stream at once (no
    `record_stream`).
    """

    def __init__(self) -> None:
        self._blocks = HostBlocks(pin=True)
        self._leaving: tuple[Tensor, torch.cuda.Event] | None = None

    def saving(self) -> AbstractContextManager[object]:
        """Have autograd keep on the host what it saves inside the block; tensors of a CPU stay."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> OnHost | Tensor:
        if not tensor.is_cuda:
            return tensor.detach()
        self._release()
        block = self._blocks.take(tensor.nbytes)
        values = block[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        saved = OnHost(values, tensor.device)
        # Once autograd has dropped it: on the card, its copies precede those of the block's next
        # user.
        weakref.finalize(saved, self._blocks.put_back, block).atexit = False
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            values.copy_(tensor, non_blocking=True)
        self._leaving = tensor.detach(), self._stream.record_event()
        return saved

    def _unpack(self, saved: OnHost | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._release()
        return saved.values.to(saved.device, non_blocking=True)

    def _release(self) -> None:
        """Have the computing stream wait for the last copy, and release the copied tensor."""
        if self._leaving is not None:
            tensor, gone = self._leaving
            torch.cuda.current_stream(tensor.device).wait_event(gone)
            self._leaving = None

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()


@cache
def inputs_on_host() -> InputsOnHost:
    """Return this process's object: its roles learn one after the other, and share the blocks."""
    return InputsOnHost()


class HostBlocks:
    """Blocks of host memory that are reused: as many as were ever in use at once.

    PyTorch's own allocator of pinned memory would make more if the host is ahead of the card, which
    still has to read the blocks of the last micro-batch.
    """

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._spare: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """Return an unused block (uint8) of at least so many bytes."""
        for place, block in enumerate(self._spare):
            if block.nbytes >= size:
                return self._spare.pop(place)
        if self._spare:
            self._spare.pop()  # packs have become longer: a larger one takes its place
        room = 1 << max(0, size - 1).bit_length()  # as PyTorch's allocator rounds it anyway
        return torch.empty(room, dtype=torch.uint8, pin_memory=self._pin)

    def put_back(self, block: Tensor) -> None:
        """Let a block from `take` be used again."""
        self._spare.append(block)
