"""How one role is trained: precision of states, ZeRO, offload, optimizer, schedule."""

from __future__ import annotations

from typing import Literal

from plimsoll.config.adapter import AdapterConfig
from plimsoll.config.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
)
from plimsoll.config.model import ModelConfig


class ZeroConfig(Settings):
    """DeepSpeed ZeRO: what is divided over the data-parallel ranks, and what lives on the host."""

    stage: Literal[0, 1, 2, 3] = 2
    """0 divides nothing, 1 the optimizer states, 2 also the gradients, 3 also the weights."""
    optimizer_offload: Literal["none", "cpu"] = "none"
    """`cpu` keeps masters and moments in host memory and steps there with DeepSpeedCPUAdam."""
    parameter_offload: Literal["none", "cpu"] = "none"
    """`cpu` keeps the divided weights in host memory; stage 3 only."""
    gradient_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What micro-batches' gradients are added up in. auto: float32, except at stage 0 with bfloat16
    weights, where DeepSpeed has only bfloat16."""
    bucket_elements: PositiveInt = 50_000_000
    """Elements per communication bucket (reduce and all-gather)."""


class OptimizerConfig(Settings):
    """AdamW and its learning-rate schedule."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps the moments in 8 bits (bitsandbytes, Dettmers et al. 2021)."""
    learning_rate: PositiveFloat = 1e-6
    """The peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The shape after warm-up; linear and cosine end at `final_ratio` of the peak."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    final_ratio: NonNegativeFloat = 0.0
    """The last learning rate as a share of the peak."""
    beta1: NonNegativeFloat = 0.9
    """Adam's beta 1."""
    beta2: NonNegativeFloat = 0.95
    """Adam's beta 2."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the global gradient norm to this; 0 turns clipping off."""


class TrainedRole(Settings):
    """A role that learns: its model, how it is divided, and its optimizer."""

    model: ModelConfig
    """The model that training starts from."""
    adapter: AdapterConfig | None = None
    """Train a low-rank adapter and leave the model as it is; default: train all weights."""
    zero: ZeroConfig = ZeroConfig()
    """Division over ranks and offload."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""


class FrozenRole(Settings):
    """A role that only scores."""

    model: ModelConfig
    """The model."""
    stage: Literal[0, 3] = 0
    """0: a whole copy on every rank; 3: divided over the ranks."""
    offload: Literal["none", "cpu"] = "none"
    """`cpu` keeps the weights in host memory while the role does not score (stage 0), or fetches
    them layer by layer (stage 3)."""
