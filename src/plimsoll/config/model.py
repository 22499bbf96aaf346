"""Which model a role runs, and how it is computed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from plimsoll.config.base import AUTO, Auto, PositiveInt, Settings, WrittenPath

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
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Leave off unless you have read that code."""

    @property
    def element(self) -> int:
        """Bytes of a weight that is not in 4 bits, and of an activation; the dtype is decided."""
        return ELEMENT_BYTES[self.dtype]
