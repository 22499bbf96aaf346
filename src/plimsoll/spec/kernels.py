"""Where the kernels are to be had that models may compute by: PyTorch's varlen_attn, the flash
attention of packed sequences, and Liger's."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.model import DecidedKernels
from plimsoll.machine.hardware import BFLOAT16_UNITS

Capability = tuple[int, int]
"""A card's compute capability."""
WIDEST_HEAD = 256
"""FlashAttention-2, in PyTorch's flash_attn/flash_api.cpp (`mha_varlen_fwd`)."""
_HEAD_STEP = 8
"""As WIDEST_HEAD; scaled_dot_product_attention pads other heads, varlen_attn does not."""


def kernels_on(device: str, capability: Capability | None, has_liger: bool) -> DecidedKernels:
    """Return whose norms, gated MLPs and rotary embeddings serve.

    Triton compiles no bfloat16 for cards without units for it, so Liger's kernels are not for them.

    Args:
        device: cuda or another.
        capability: of the card, or the lowest of several; None where it is not known.
        has_liger: whether liger-kernel is installed.
    """
    able = capability is None or capability >= BFLOAT16_UNITS
    return "liger" if device == "cuda" and able and has_liger else "own"


def against_varlen(
    device: str, capability: Capability | None, dtype: str, softcapped: bool, head_dim: int
) -> Iterator[str]:
    """Every reason for which varlen_attn cannot compute a model.

    device: cuda or another. capability: of the card; None where unknown. dtype: of the model.
    softcapped: the family bounds its attention scores. head_dim: of one head; 0 where unknown.
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
