"""How a forward and backward is computed, as far as its memory depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from plimsoll.config.cluster import Device
from plimsoll.config.engine import AdapterConfig
from plimsoll.config.model import ModelConfig
from plimsoll.machine.hardware import BFLOAT16_UNITS
from plimsoll.shapes.shape import ModelShape
from plimsoll.spec.kernels import Capability, against_varlen
from plimsoll.spec.roles import HeadKind

Attention = Literal["varlen", "sdpa", "eager"]
"""varlen: one flash kernel for the pack (FlashAttention-2 too). sdpa: a kernel per sequence.
eager: the scores are written out."""

BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
"""In fp32 at once: of softmaxes and of fused norms, as in model/logit_chunks.py."""

Fused = Literal["none", "own", "liger"]
"""Whose norms and gated MLPs are: those of transformers, of model/fused.py, of model/liger.py."""


@dataclass(frozen=True)
class ChunkedHead:
    """`token_logprobs`: logits of `rows` learned tokens at once.

    entropy: it is computed too. scaled: the logits are divided by a temperature that is not 1.
    """

    rows: int
    entropy: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class UnfusedHead:
    """Logits of every token at once, and a loss in fp32, as Hugging Face's models have them: none
    of Plimsoll's, but what others' runs are priced with (benchmarks/peak_models.py)."""


@dataclass(frozen=True)
class ValueHead:
    """One number for each learned token, in fp32."""


@dataclass(frozen=True)
class TeacherHead:
    """`distil`: logits of `rows` learned tokens at once, and the same of a teacher's.

    hidden: the teacher's hidden size. element: bytes of its weights.
    """

    rows: int
    hidden: int
    element: int


@dataclass(frozen=True)
class NoHead:
    """Hidden states alone: a teacher's, whose head is run with its student's."""


Head = ChunkedHead | UnfusedHead | ValueHead | TeacherHead | NoHead


@dataclass(frozen=True)
class AdapterForm:
    """A low-rank adapter.

    targets: last parts of module names, or ("all-linear",). element: bytes of its weights; where
    they are wider than the model's, each adapted linear casts its input to them. dropout: on its
    input. dora: magnitudes are learned too.
    """

    rank: int
    targets: tuple[str, ...]
    element: int
    dropout: bool = False
    dora: bool = False


@dataclass(frozen=True)
class ActivationForm:
    """How a forward and backward is computed.

    element: bytes of a weight and of an activation (2 in bfloat16).
    checkpoint_every: None keeps all activations; k checkpoints the first of every k layers: of it
        the input is kept, and the rest computed again.
    selective: of checkpointed layers the results of matrix products and attention are kept too.
    trained: forward and backward; else forward only, without autograd.
    adapter: None trains all weights; else only the adapter.
    quantized: linear weights are in 4 bits, and one at a time is written out for use.
    inputs_on_host: the inputs of checkpointed layers are moved to pinned host memory.
    fused: whose norms and gated MLPs serve where they know the family's.
    flash: with sdpa on a card, its flash kernel serves where there is no mask; others have keys and
        values repeated for every head (model/attention.py).
    kernels: and one of its kernels takes the model's dtype; else the scores of a sequence at a time
        are written out, in fp32.
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
    def written(self) -> bool:
        """Whether attention's scores are, for want of a kernel."""
        return self.attention == "sdpa" and self.device != "cpu" and not self.kernels

    def adapts(self, linear: str) -> bool:
        """Whether a linear layer of that name has an adapter."""
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
) -> ActivationForm:
    """How a role's model is trained; parameters as those of `roles.trained_role` and `RoleWork`."""
    pair = None
    if adapter is not None:
        dropout = adapter.dropout > 0
        pair = AdapterForm(adapter.rank, adapter.targets, model.element, dropout, adapter.dora)
    return ActivationForm(
        element=model.element,
        checkpoint_every=model.checkpoint_every if model.gradient_checkpointing else None,
        attention=cast(Attention, model.attention),
        head=_head(head, ChunkedHead(model.head_chunk, entropy, scaled)),
        trained=True,
        adapter=pair,
        quantized=model.quantization != "none",
        selective=model.gradient_checkpointing == "selective",
        inputs_on_host=model.activation_offload == "cpu" and device == "cuda",
        device=device,
        fused=cast(Fused, model.kernels),
        flash=not any(against_varlen(device, capability, model.dtype, False, shape.head_dim)),
        kernels=has_kernels(capability, model.dtype),
    )


def _head(kind: HeadKind, policy: ChunkedHead) -> Head:
    match kind:
        case "policy":
            return policy
        case "value":
            return ValueHead()
        case "states":
            return NoHead()


def has_kernels(capability: Capability | None, dtype: str) -> bool:
    """Whether a card has one of PyTorch's kernels of attention; sdp_utils.cpp takes float16 and
    float32 alone where there are no units for bfloat16 (`less_than_sm80_mem_efficient_dtypes`).

    Parameters as those of `against_varlen`.
    """
    return dtype != "bfloat16" or capability is None or capability >= BFLOAT16_UNITS
