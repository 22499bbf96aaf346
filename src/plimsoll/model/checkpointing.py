"""Gradient checkpointing: decide which tensors layers keep for the backward pass, and where.

The inputs of checkpointed layers may be kept in pinned host memory until the backward pass.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.nn.attention.varlen  # makes its operation known
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from plimsoll.config.engine import ModelConfig
from plimsoll.errors import ConfigError, PlimsollError


@dataclass(frozen=True, eq=False)
class _OnHost:
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
        """Return a context in which the tensors that autograd saves are moved from card to host."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _OnHost | Tensor:
        if not tensor.is_cuda:
            return tensor.detach()
        self._release()
        block = self._blocks.take(tensor.nbytes)
        values = block[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        saved = _OnHost(values, tensor.device)
        # Once autograd has dropped it: on the card, its copies precede those of the block's next
        # user.
        weakref.finalize(saved, self._blocks.put_back, block).atexit = False
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            values.copy_(tensor, non_blocking=True)
        self._leaving = tensor.detach(), self._stream.record_event()
        return saved

    def _unpack(self, saved: _OnHost | Tensor) -> Tensor:
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
def _inputs_on_host() -> InputsOnHost:
    """Return the single object of this process; its roles train in turn and share the blocks."""
    return InputsOnHost()


class HostBlocks:
    """Blocks of host memory that are reused; there are as many as were ever in use at once.

    PyTorch's own allocator of pinned memory would make more blocks. If the host is ahead of the
    card, it does not reuse blocks of the last micro-batch that the card still has to read.
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
        return torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=self._pin)

    def put_back(self, block: Tensor) -> None:
        """Let a block from `take` be used again."""
        self._spare.append(block)


_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
)


def checkpoint_layers(lm: PreTrainedModel, config: ModelConfig) -> None:
    """Have the layers that the config names recompute tensors in the backward pass, in place.

    Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174; selective: Korthikanti et al. 2022,
    https://arxiv.org/abs/2205.05198, section 5. Raises ConfigError if the model's layers are not
    transformers' checkpointing layers.
    """
    if config.gradient_checkpointing is False:
        return
    settings: dict[str, Any] = {"use_reentrant": False}
    if config.gradient_checkpointing == "selective":
        settings["context_fn"] = partial(selective_contexts, lm.config.hidden_size // 2)
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers and (config.checkpoint_every > 1 or config.activation_offload == "cpu"):
        raise ConfigError(
            f"{config.path}: model.checkpoint_every is {config.checkpoint_every} and "
            f"model.activation_offload is {config.activation_offload}, but the layers of "
            f"{type(lm).__name__} are not transformers' GradientCheckpointingLayer, which alone "
            "can be set one by one. Leave both keys out."
        )
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % config.checkpoint_every == 0
        if config.activation_offload == "cpu":
            # By the class's docstring, this attribute is the function that checkpoints.
            layer._gradient_checkpointing_func = partial(
                _with_inputs_on_host, _inputs_on_host(), layer._gradient_checkpointing_func
            )


def selective_contexts(thin: int) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a layer's first forward and of its recomputation, for `checkpoint`.

    The results of attention are kept, and of matrix products whose inner dimension is at least
    `thin`. So an adapter's second product, whose inner dimension is its rank, is recomputed.

    torch's own create_selective_checkpoint_contexts needs the same operations both times. Within a
    layer ZeRO stage 3 gathers weights, and skips that for weights that are present.
    """
    kept: deque[Any] = deque()
    return _Keep(thin, kept), _Reuse(thin, kept)


_KEEPS = ContextVar("keeps", default=True)


@contextmanager
def keep_no_products() -> Iterator[None]:
    """During the block, have selective checkpointing keep nothing."""
    before = _KEEPS.set(False)
    try:
        yield
    finally:
        _KEEPS.reset(before)


class _Keep(TorchDispatchMode):
    """Stores, in order, the results that the backward pass does not recompute."""

    def __init__(self, thin: int, kept: deque[Any]) -> None:
        super().__init__()
        self._thin, self._kept = thin, kept

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if _is_kept(func, args, self._thin):
            # Detached from the graph of the first forward.
            self._kept.append(tree_map_only(Tensor, Tensor.detach, result))
        return result


class _Reuse(TorchDispatchMode):
    """Returns the stored results, in order, instead of computing them.

    It also skips operations that changed these results in place. DeepSpeed's linear at ZeRO stage 3
    adds its bias in this way.
    """

    def __init__(self, thin: int, kept: deque[Any]) -> None:
        super().__init__()
        self._thin, self._kept = thin, kept
        self._begun = False
        # Weak references: another tensor may later get the memory of a freed result.
        self._reused: WeakSet[UntypedStorage] = WeakSet()

    def __enter__(self) -> Self:
        if self._begun:
            raise PlimsollError(
                "A second backward pass went through a layer whose gradient_checkpointing is "
                "selective. The first pass used up the kept tensors. Set it to true."
            )
        self._begun = True
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_kept(func, args, self._thin):
            result = self._kept.popleft()
            self._reused.update(filter(None, map(_storage, tree_leaves(result))))
            return result
        if func._schema.is_mutable and args and _storage(args[0]) in self._reused:
            return args[0]
        return func(*args, **kwargs or {})


def _is_kept(operation: OpOverload, inputs: Sequence[Any], thin: int) -> bool:
    if not _KEEPS.get():
        return False
    if operation in _PRODUCTS:
        left: Tensor = inputs[-2]
        return left.shape[1] >= thin
    return operation in _ATTENTION


def _storage(value: object) -> UntypedStorage | None:
    return value.untyped_storage() if isinstance(value, Tensor) else None


def _with_inputs_on_host(
    on_host: InputsOnHost,
    checkpoint: Callable[..., Any],
    function: Callable[..., Any],
    *inputs: Any,
) -> Any:
    """Return a checkpointed layer's output; only its inputs go to the host, not what it saves."""
    with on_host.saving():
        return checkpoint(function, *inputs)
