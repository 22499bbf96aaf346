"""The model of a role and how it is computed, and how the role is trained or scores.

Precision of states, ZeRO, offload, adapter, optimizer and schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from types import MappingProxyType
from typing import Literal

from plimsoll.config.base import (
    AUTO,
    Auto,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Settings,
    WrittenPath,
)
from plimsoll.config.engines import TRAINER_ENGINES, HasEngine, with_engines

DecidedDtype = Literal["bfloat16", "float32"]
Dtype = Literal[Auto, DecidedDtype]
DecidedKernels = Literal["own", "liger"]
ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"bfloat16": 2, "float32": 4})
"""Bytes of one number, by decided dtype."""


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A directory without any of these has no tokenizer."""


class ModelConfig(Settings):
    """A transformers decoder in a local directory or on the hub."""

    path: WrittenPath
    """A directory in Hugging Face format, or a name on the model hub."""
    dtype: Dtype = AUTO
    """The dtype of weights and activations; the optimizer keeps fp32 masters of bfloat16 weights.
    auto: bfloat16 on GPUs from compute capability 8.0 on and on CPUs with instructions for it
    (AMX, AVX-512 BF16, ARM's BF16), float32 elsewhere, where bfloat16 is much slower."""
    quantization: Literal["none", "nf4"] = "none"
    """`nf4` keeps the linear layers' weights in 4 bits (QLoRA); such a model can only be frozen, or
    trained through an adapter."""
    double_quantization: bool = True
    """Quantise the scales of nf4 blocks too: 0.516 instead of 0.5625 bytes a parameter."""
    attention: Literal[Auto, "sdpa", "varlen"] = AUTO
    """Packed attention: `varlen` is PyTorch's varlen_attn (CUDA), `sdpa` works per sequence;
    auto takes varlen on CUDA."""
    kernels: Literal[Auto, DecidedKernels] = AUTO
    """Norms, gated MLPs and rotary embeddings: `liger` computes them by Liger's Triton kernels (on
    GPUs from compute capability 8.0 on), `own` by Plimsoll's functions; auto takes Liger's where
    liger-kernel is installed."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Layers whose activations are computed again in the backward pass. `true`: all but the layer's
    input, for about a third more compute; `selective`: all but matrix products and attention."""
    checkpoint_every: PositiveInt = 1
    """Checkpoint the first of every this many layers; the others keep their activations."""
    activation_offload: Literal["none", "cpu"] = "none"
    """`cpu` keeps the inputs of checkpointed layers in host memory until the backward pass."""
    head_chunk: PositiveInt = 1024
    """Learned tokens whose logits exist at once; the head's memory is head_chunk * vocabulary."""
    mlp_tile: PositiveInt | None = None
    """Tokens whose MLP is computed at once, forward and backward; default: all of a micro-batch.
    Each MLP is computed again in the backward pass. Routed experts are not tiled."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Leave off unless you have read that code."""

    @property
    def element(self) -> int:
        """Bytes of a weight that is not in 4 bits, and of an activation; the dtype is decided."""
        return ELEMENT_BYTES[self.dtype]


ADAPTER_FILE = "adapter_config.json"
"""PEFT's config in an adapter's directory."""


ALL_LINEAR = "all-linear"
"""The target of adapters that stands for every linear layer but the output head."""


class AdapterConfig(Settings):
    """LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685; trained and saved with PEFT."""

    rank: PositiveInt = 16
    """The inner dimension of each pair of matrices."""
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by alpha / rank (with rslora, by alpha / sqrt(rank))."""
    dropout: Probability = 0.0
    """Dropout on the adapter's input."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """The modules that get adapters, by the last part of their names, such as q_proj;
    `all-linear` is every linear layer but the output head."""
    rslora: bool = False
    """Scale by the root of the rank; Kalajdzievski 2023, https://arxiv.org/abs/2312.03732."""
    dora: bool = False
    """Learn magnitudes apart from directions; Liu et al. 2024, https://arxiv.org/abs/2402.09353."""
    modules_to_save: tuple[Literal["embed_tokens", "lm_head"], ...] = ()
    """Modules that are trained whole, and saved with the adapter: for a tokenizer with new tokens,
    both. Where the two are one tensor (tie_word_embeddings), either name trains it."""
    path: str | None = None
    """A directory with an adapter to go on from, such as runs/NAME/model. Its rank, alpha, targets
    and form must be those that are given here. Default: a new adapter."""


class ReferenceLogprobsConfig(Settings):
    """The reference's log-probs: computed batch by batch, or once before the actor is loaded."""

    precompute: bool = False
    """Before the actor is loaded, score everything that the run will see, and keep the numbers. The
    reference is then never in memory beside the actor and its optimizer."""
    path: WrittenPath | None = None
    """The Parquet file with the numbers; default: reference-logprobs.parquet in the run directory.
    An existing file must be of the same reference; missing numbers are computed and added."""


class OptimizerConfig(Settings):
    """AdamW and its learning-rate schedule."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps the moments in 8 bits (bitsandbytes, Dettmers et al. 2021)."""
    learning_rate: PositiveFloat = 1e-6
    """The peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """The shape after warm-up; all but constant end at `final_ratio` of the peak. wsd (warm-up,
    stable, decay) stays at the peak, and falls over the last `decay_steps`."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the rate rises linearly to the peak."""
    warmup_ratio: Probability = 0.0
    """The same as a share of the run's optimizer steps, rounded up. Give this or warmup_steps."""
    decay_steps: PositiveInt | None = None
    """wsd: optimizer steps over which the rate falls; default: a tenth of the run's."""
    final_ratio: NonNegativeFloat = 0.0
    """The last learning rate as a share of the peak."""
    beta1: NonNegativeFloat = 0.9
    """Adam's beta 1."""
    beta2: NonNegativeFloat = 0.95
    """Adam's beta 2."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices; vectors (norms, biases) do not decay."""
    decay_embeddings: bool = True
    """Whether embeddings, and a head that is tied to them, decay as other matrices do."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the global gradient norm to this; 0 turns clipping off."""
    max_skipped_steps: NonNegativeInt | None = None
    """The most optimizer steps in a row that this role leaves out because their gradient is not
    finite; one more stops the run. Default: `run.max_bad_steps` alone counts."""

    def warmup(self, updates: int) -> int:
        """Return the number of warm-up steps; `updates` are the optimizer steps in all."""
        return self.warmup_steps or ceil(self.warmup_ratio * updates)


class EmaConfig(Settings):
    """An exponential moving average of the weights, kept in fp32 in addition to the masters."""

    decay: PositiveFloat = 0.999
    """The share of the average that stays at each step; it rises to this value over the first
    steps."""


@with_engines(TRAINER_ENGINES, "TRAINED")
class TrainedRole(HasEngine):
    """A role that learns: its model, its optimizer, and the engine that trains it."""

    model: ModelConfig
    """The model that training starts from."""
    adapter: AdapterConfig | None = None
    """Train a low-rank adapter and leave the model as it is; default: train all weights."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    ema: EmaConfig | None = None
    """Keep a moving average of the weights, which is the final model; default: none."""
    freeze: Literal["none", "router"] = "none"
    """Weights that stay as they are: `router` those that choose the experts of each token, in a
    mixture of experts (an adapter leaves them as they are in any case)."""


@with_engines(TRAINER_ENGINES, "FROZEN")
class FrozenRole(HasEngine):
    """A role that only scores: its model, and the engine that holds it."""

    model: ModelConfig
    """The model."""
