"""Decide where models can use PyTorch's varlen_attn (flash attention of packs) and Liger's kernels.

Used before a run (`resolve/decisions.py`), by rules, and when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.engine import DecidedKernels
from plimsoll.machine.hardware import BFLOAT16_UNITS

Capability = tuple[int, int]
"""A card's compute capability."""
WIDEST_HEAD = 256
"""The widest head of FlashAttention-2, in PyTorch's flash_attn/flash_api.cpp (`mha_varlen_fwd`)."""
_HEAD_STEP = 8
"""A head's width must be a multiple of this for varlen_attn; scaled_dot_product_attention pads."""


def choose_kernels(
    device: str, capability: Capability | None, has_liger: bool
) -> tuple[DecidedKernels, str]:
    """Return whose norms, gated MLPs and rotary embeddings to use, and the reason as a clause.

    `capability` is the card's, or the lowest of several; None if unknown.
    """
    if device == "cpu":
        return "own", "Liger's are for GPUs"
    if capability is not None and capability < BFLOAT16_UNITS:  # Triton has no bfloat16 for them
        return "own", "the cards are older than Liger's"
    if not has_liger:
        return "own", "liger-kernel is not here"
    return "liger", "liger-kernel has them for these GPUs"


def against_varlen(
    device: str, capability: Capability | None, dtype: str, softcapped: bool, head_dim: int
) -> Iterator[str]:
    """Yield every reason why varlen_attn cannot compute a model; nothing if it can.

    An unknown `capability` is None, an unknown `head_dim` 0. `softcapped` says whether the model
    bounds its attention scores.
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
