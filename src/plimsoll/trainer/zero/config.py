"""The settings of DeepSpeed ZeRO: of a role that learns, and of one that only scores."""

from __future__ import annotations

from typing import Literal

from plimsoll.config.base import AUTO, Auto, EvenInt, PositiveInt, Settings


class ZeroConfig(Settings):
    """DeepSpeed ZeRO: what is divided over the data-parallel ranks, and what lives on the host."""

    stage: Literal[0, 1, 2, 3] = 2
    """0 divides nothing, 1 the optimizer states, 2 also the gradients, 3 also the weights."""
    optimizer_offload: Literal["none", "cpu"] = "none"
    """`cpu` keeps masters and moments in host memory and steps there with DeepSpeedCPUAdam."""
    parameter_offload: Literal["none", "cpu"] = "none"
    """`cpu` keeps the divided weights in host memory; stage 3 only."""
    gradient_dtype: Literal[Auto, "float32", "bfloat16"] = AUTO
    """The dtype in which micro-batches' gradients are added up. auto: float32, except at stage 0
    with bfloat16 weights, where DeepSpeed has only bfloat16."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the masters and moments of bfloat16 weights. bfloat16 saves 6 bytes a parameter
    and loses updates below 1/512 of a weight."""
    quantized_weights: bool = False
    """ZeRO++ (Wang et al. 2023): ranks send one another weights in 8 bits. Stage 3, on GPUs."""
    quantized_gradients: bool = False
    """ZeRO++: ranks send one another gradients in 4 bits. Stage 3, on GPUs."""
    hpz_partition_size: PositiveInt = 1
    """ZeRO++: this many neighbouring ranks (those of a node) together keep a second copy of the
    weights, which the backward pass gathers from instead of from all ranks. Stage 3, on GPUs."""
    bucket_elements: EvenInt = 50_000_000
    """Elements per communication bucket (reduce and all-gather). DeepSpeed needs an even number."""


class FrozenZeroConfig(Settings):
    """How a model that only scores is divided over the ranks, and where its weights wait."""

    stage: Literal[0, 3] = 0
    """0: a full copy on every rank; 3: divided over the ranks by ZeRO."""
    offload: Literal["none", "cpu"] = "none"
    """`cpu` keeps the weights in host memory while the role does not score (stage 0), or fetches
    them layer by layer (stage 3)."""


TRAINED = ZeroConfig
FROZEN = FrozenZeroConfig
