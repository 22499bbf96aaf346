"""Attention of `generate` for models with fewer heads of keys than of queries.

That is grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245), registered
with transformers' AttentionInterface, whose own copies the KV cache for every head of queries at
each token.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "plimsoll_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention as `sdpa` of transformers does, without copies of keys and values.

    Query [sequences, heads, tokens, width], keys and values [sequences, key-value heads, tokens so
    far, width]; the result is [sequences, tokens, heads, width].

    One token of each sequence, which sees all before it, has the same mask in all heads: the
    queries of a group are then as many rows before the same keys, and nothing is copied.
    """
    sequences, heads, tokens, width = query.shape
    groups = key.shape[1]
    if tokens > 1 or heads == groups or options.get("position_bias") is not None:
        inputs = module, query, key, value, attention_mask, dropout, scaling
        whole: tuple[Tensor, None] = sdpa_attention_forward(*inputs, **options)
        return whole
    rows = query.reshape(sequences, groups, heads // groups, width)
    attended = scaled_dot_product_attention(
        rows, key, value, attention_mask, dropout, scale=scaling
    )
    return attended.reshape(sequences, 1, heads, width), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
