"""How a forward and backward pass is computed, as far as its memory depends on it.

The file also decides where PyTorch's varlen_attn, the flash attention of packed sequences, runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from plimsoll.config.cluster import Device
from plimsoll.config.engine import AdapterConfig
from plimsoll.config.model import ModelConfig
from plimsoll.machine.hardware import BFLOAT16_UNITS
from plimsoll.shapes.shape import ModelShape
from plimsoll.spec.roles import HeadKind

Attention = Literal["varlen", "sdpa", "eager"]
"""How attention is computed.

varlen: one flash kernel for the pack (FlashAttention-2 too). sdpa: a kernel per sequence. eager:
plain products that hold the scores.
"""

BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
"""fp32 elements of softmaxes and fused norms that exist at once, as in model/logit_chunks.py."""

Fused = Literal["none", "own", "liger"]
"""The origin of norms and gated MLPs: transformers, model/fused.py or model/liger.py."""

Capability = tuple[int, int]
WIDEST_HEAD = 256
"""The widest head of FlashAttention-2, in PyTorch's flash_attn/flash_api.cpp (`mha_varlen_fwd`)."""
_HEAD_STEP = 8
"""A head's width must be a multiple of this for varlen_attn; scaled_dot_product_attention pads."""


@dataclass(frozen=True)
class ChunkedHead:
    """`token_logprobs`: logits of `rows` learned tokens at once, and their entropy.

    `scaled`: the logits are divided by a temperature that is not 1.
    """

    rows: int
    entropy: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class UnfusedHead:
    """Logits of every token at once, and a loss in fp32, as Hugging Face's models compute them.

    Plimsoll has no such head; other systems' runs are priced with it (benchmarks/peak_models.py).
    """


@dataclass(frozen=True)
class ScalarHead:
    """One number for each learned token, in fp32."""


@dataclass(frozen=True)
class TeacherHead:
    """`distil`: logits of `rows` learned tokens at once, and the same of a teacher's.

    `hidden` and `element` are the teacher's hidden size and the bytes of its weights.
    """

    rows: int
    hidden: int
    element: int


@dataclass(frozen=True)
class NoHead:
    """Hidden states alone, of a teacher whose head runs with its student's."""


Head = ChunkedHead | UnfusedHead | ScalarHead | TeacherHead | NoHead


@dataclass(frozen=True)
class AdapterForm:
    """A low-rank adapter.

    Attributes:
        rank: the inner width.
        targets: last parts of module names, or ("all-linear",).
        element: bytes of a weight; if they exceed the model's, each adapted linear casts its input.
        dropout: whether the input has dropout.
        dora: whether magnitudes are learned too.
    """

    rank: int
    targets: tuple[str, ...]
    element: int
    dropout: bool = False
    dora: bool = False


@dataclass(frozen=True)
class ActivationForm:
    """How a forward and backward pass is computed.

    Attributes:
        element: bytes of a weight and of an activation (2 in bfloat16).
        checkpoint_every: None keeps all activations; k checkpoints the first of every k layers,
            which keep their input and recompute the rest.
        attention: how attention is computed.
        head: how the head is computed.
        trained: forward and backward; else forward only, without autograd.
        adapter: None trains all weights; else only the adapter.
        quantized: linear weights are in 4 bits, and dequantised one at a time.
        selective: checkpointed layers keep the results of matrix products and attention too.
        inputs_on_host: the inputs of checkpointed layers are moved to pinned host memory.
        device: where the model runs.
        fused: whose norms and gated MLPs are used, if they know the family's.
        flash: whether sdpa on a card uses the flash kernel without a mask; other kernels get keys
            and values repeated for every head (model/attention.py).
        kernels: whether any kernel of sdpa on a card takes the model's dtype; else the scores of
            one sequence at a time are held, in fp32.
    """

    element: int
    checkpoint_every: int | None
    attention: Attention
    head: Head
    trained: bool
    adapter: AdapterForm | None = None
    quantized: bool = False
    selective: bool = False
    inputs_on_host: bool = False
    device: Literal["cuda", "cpu"] = "cuda"
    fused: Fused = "none"
    flash: bool = True
    kernels: bool = True

    @property
    def writes_scores(self) -> bool:
        """Whether attention's scores are held, because no kernel computes them."""
        return self.attention == "sdpa" and self.device != "cpu" and not self.kernels

    def adapts(self, linear: str) -> bool:
        """Return whether a linear layer of that name has an adapter."""
        targets = self.adapter.targets if self.adapter else ()
        return linear in targets or "all-linear" in targets


def activation_form(
    model: ModelConfig,
    adapter: AdapterConfig | None,
    shape: ModelShape,
    head: HeadKind,
    device: Device,
    entropy: bool,
    scaled: bool,
    capability: Capability | None = None,
    fused: Fused = "own",
) -> ActivationForm:
    """Return how a role's model is trained; parameters as of `trained_role` and `RoleWork`."""
    pair = None
    if adapter is not None:
        dropout = adapter.dropout > 0
        pair = AdapterForm(adapter.rank, adapter.targets, model.element, dropout, adapter.dora)
    return ActivationForm(
        element=model.element,
        checkpoint_every=model.checkpoint_every if model.gradient_checkpointing else None,
        attention=attention_of(model, shape, device, capability),
        head=_head(head, ChunkedHead(model.head_chunk, entropy, scaled)),
        trained=True,
        adapter=pair,
        quantized=model.quantization != "none",
        selective=model.gradient_checkpointing == "selective",
        inputs_on_host=model.activation_offload == "cpu" and device == "cuda",
        device=device,
        fused=fused,
        flash=not any(against_varlen(device, capability, model.dtype, False, shape.head_dim)),
        kernels=has_kernels(capability, model.dtype),
    )


def _head(kind: HeadKind, policy: ChunkedHead) -> Head:
    match kind:
        case "policy":
            return policy
        case "value":
            return ScalarHead()
        case "states":
            return NoHead()


def attention_of(
    model: ModelConfig, shape: ModelShape, device: Device, capability: Capability | None
) -> Attention:
    """Return the attention of a model, with `auto` resolved as model/load.py resolves it.

    `capability` is the lowest of the run's cards; None if unknown.
    """
    if model.attention != "auto":
        return model.attention
    obstacles = against_varlen(device, capability, model.dtype, shape.softcapped, shape.head_dim)
    return "sdpa" if any(obstacles) else "varlen"


def fused_by(device: str, capability: Capability | None, has_liger: bool) -> Fused:
    """Return whose norms and gated MLPs are used.

    Liger's kernels need a card with units for bfloat16: Triton compiles no bfloat16 for others.

    Args:
        device: cuda or another.
        capability: the card's, or the lowest of several; None if unknown.
        has_liger: whether liger-kernel is installed.
    """
    able = capability is None or capability >= BFLOAT16_UNITS
    return "liger" if device == "cuda" and able and has_liger else "own"


def has_kernels(capability: Capability | None, dtype: str) -> bool:
    """Return whether PyTorch has an attention kernel for a card and dtype.

    On cards without units for bfloat16, sdp_utils.cpp takes float16 and float32 alone
    (`less_than_sm80_mem_efficient_dtypes`). Parameters as of `against_varlen`.
    """
    return dtype != "bfloat16" or capability is None or capability >= BFLOAT16_UNITS


def against_varlen(
    device: str, capability: Capability | None, dtype: str, softcapped: bool, head_dim: int
) -> Iterator[str]:
    """Yield every reason why varlen_attn cannot compute a model.

    Args:
        device: cuda or another.
        capability: the card's; None if unknown.
        dtype: the model's dtype.
        softcapped: whether the family bounds its attention scores.
        head_dim: the width of a head; 0 if unknown.
    """
    if device != "cuda":
        yield f"it runs on CUDA, and this is {device}"
    elif capability is not None and capability < BFLOAT16_UNITS:
        yield "it needs compute capability 8.0, and the card has {}.{}".format(*capability)
    if dtype != "bfloat16":
        yield f"it computes in bfloat16, and model.dtype is {dtype}"
    if softcapped:
        yield "the model caps its attention scores (attn_logit_softcapping), which it cannot"
    if head_dim > WIDEST_HEAD:
        yield f"it has heads of at most {WIDEST_HEAD} dimensions, not {head_dim}"
    if head_dim % _HEAD_STEP:
        yield f"it has heads of a multiple of {_HEAD_STEP} dimensions, not {head_dim}"
