"""Where PyTorch's varlen_attn, the flash attention of packed sequences, is to be had."""

from __future__ import annotations

from collections.abc import Iterator

Capability = tuple[int, int]
BFLOAT16_UNITS: Capability = (8, 0)
"""The compute capability from which on cards have units for bfloat16, and flash attention runs."""
WIDEST_HEAD = 256
"""FlashAttention-2, in PyTorch's flash_attn/flash_api.cpp (`mha_varlen_fwd`)."""
_HEAD_STEP = 8
"""As WIDEST_HEAD; scaled_dot_product_attention pads other heads, varlen_attn does not."""


def has_kernels(capability: Capability | None, dtype: str) -> bool:
    """Whether a card has one of PyTorch's kernels of attention; sdp_utils.cpp takes float16 and
    float32 alone where there are no units for bfloat16 (`less_than_sm80_mem_efficient_dtypes`).

    Parameters as those of `against_varlen`.
    """
    return dtype != "bfloat16" or capability is None or capability >= BFLOAT16_UNITS


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
