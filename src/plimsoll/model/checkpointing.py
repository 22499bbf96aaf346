"""Gradient checkpointing and its offload: the tensors that layers keep for the backward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.nn.attention.varlen  # makes its operation known
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from plimsoll.config.model import ModelConfig
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.model.inputs_on_host import InputsOnHost, inputs_on_host

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
    """Let layers recompute in the backward pass, as the config says, instead of keeping tensors.

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
                _with_inputs_on_host, inputs_on_host(), layer._gradient_checkpointing_func
            )


def selective_contexts(thin: int) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a layer's first forward and of its recomputation, for `checkpoint`.

    Attention is kept, and products whose inner dimension is at least `thin`: not an adapter's
    second matrix, whose inner dimension is its rank.

    torch's own create_selective_checkpoint_contexts needs the same operations both times. Within a
    layer ZeRO stage 3 gathers weights, and skips that for weights that are present.
    """
    kept: deque[Any] = deque()
    return _Keep(thin, kept), _Reuse(thin, kept)


class _Keep(TorchDispatchMode):
    """Stores the results that are not to be recomputed, in order."""

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

    It also skips operations that changed them in place: DeepSpeed's linear at ZeRO stage 3 adds its
    bias so.
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
    """Checkpoint a layer; only its inputs pass the hooks, not the tensors that it saves itself."""
    with on_host.saving():
        return checkpoint(function, *inputs)
