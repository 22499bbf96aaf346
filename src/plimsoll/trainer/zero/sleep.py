"""Tensors of a rank that wait in host memory while others use its card.

A storage is emptied and filled again, never replaced (as in PyTorch's FSDP). So every view stays a
view: weights in DeepSpeed's flat buffers, masters in optimizer states, fragments. Hooks keep their
tensors. Only addresses on the card change, so a CUDA graph that was captured with them must be
captured again; ranks capture none.

DeepSpeed 0.19.8 has `offload_states`. It serves neither stage 0 nor BF16_Optimizer, wants its own
FusedAdam at stage 3, and unlinks masters from weights at stages 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

_LIBRARIES = ("deepspeed", "torch", "bitsandbytes")
"""Packages whose objects are searched for tensors."""
_BESIDE = ("ds_tensor", "ds_secondary_tensor", "quant_state")
"""What DeepSpeed and bitsandbytes keep of a weight as attributes of its parameter."""


@dataclass(frozen=True)
class _Moved:
    """A storage that is empty now, the size that it had, and its bytes unless they held nothing."""

    storage: UntypedStorage
    size: int
    block: Tensor | None


class HostCopies:
    """The storages of a device that are asleep, with their bytes in host memory (pinned for CUDA).

    `device`: the device whose tensors can sleep.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, _Moved] = {}

    def __bool__(self) -> bool:
        """Return whether anything is asleep."""
        return bool(self._moved)

    def put(self, tensors: Iterable[Tensor], unused: Iterable[Tensor] = ()) -> None:
        """Move the storages of these tensors to host memory; those of other devices stay.

        So does a storage that cannot be emptied: on CPU, weights that are mapped from a file.
        `unused`: tensors whose values nobody reads again; they are not copied.
        """
        self._synchronize()  # other streams may still read the tensors
        for tensor in unused:
            self._empty(tensor, copies=False)
        for tensor in tensors:
            self._empty(tensor, copies=True)
        self._synchronize()  # so that the host may read the copies
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # so that other processes may have the memory

    def _empty(self, tensor: Tensor, copies: bool) -> None:
        storage = tensor.untyped_storage()
        here = storage.device.type == self._device.type and storage.resizable()
        if here and (size := storage.nbytes()):
            block = None
            if copies:
                pin = self._device.type == "cuda"
                block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
                block.copy_(_bytes_of(storage), non_blocking=True)
            self._moved[storage._cdata] = _Moved(storage, size, block)
            storage.resize_(0)

    def take_back(self) -> None:
        """Move everything back to the device."""
        for moved in self._moved.values():
            moved.storage.resize_(moved.size)
            if moved.block is not None:
                _bytes_of(moved.storage).copy_(moved.block, non_blocking=True)
        self._moved.clear()
        self._synchronize()  # DeepSpeed gathers weights on another stream, which would not wait

    def readable(self, tensor: Tensor) -> Tensor:
        """Return a tensor that can be read: its host copy if it is asleep, else itself."""
        moved = self._moved.get(tensor.untyped_storage()._cdata)
        if moved is None:
            return tensor
        assert moved.block is not None, "a tensor that nobody reads"
        view = torch.empty(0, dtype=tensor.dtype, device="cpu")
        storage = moved.block.untyped_storage()
        return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def weights_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors of a module's weights: whole or divided, with the scales of 4 bits."""
    for parameter in module.parameters():
        yield parameter
        yield from held_tensors([getattr(parameter, name, None) for name in _BESIDE])
    yield from module.buffers()


def states_of(module: nn.Module, optimizer: object) -> Iterator[Tensor]:
    """Yield the tensors that an optimizer holds and that are not of the module's weights."""
    weights = {tensor.untyped_storage()._cdata for tensor in weights_of(module)}
    for tensor in held_tensors([optimizer, *module.parameters()]):
        if tensor.untyped_storage()._cdata not in weights:
            yield tensor


def buckets_of(optimizer: Any) -> Iterator[Tensor]:
    """Yield the buffers in which DeepSpeed reduces gradients: they hold nothing between steps."""
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        yield from held_tensors(bucket.buffer)


def held_tensors(root: object) -> Iterator[Tensor]:
    """Yield the tensors that an object holds in its attributes, at any depth, and their gradients.

    Containers are searched, and objects of DeepSpeed, PyTorch and bitsandbytes, but no modules.
    """
    seen: dict[int, object] = {}  # keeps the objects alive, so that no number is given twice
    found: list[Any] = [root]
    while found:
        value = found.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            yield value
            found.append(value.grad if value.is_leaf else None)
        elif isinstance(value, Mapping):
            found += value.values()
        elif isinstance(value, list | tuple | set):
            found += value
        elif isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
            continue
        elif type(value).__module__.split(".")[0] in _LIBRARIES:
            found += vars(value).values()
