"""PyTorch's attention of one sequence, by a kernel that does not write its scores out.

On CUDA only the flash kernel takes fewer heads of keys than of queries. Where it cannot be had (no
bfloat16, a card below compute capability 8.0, a mask), PyTorch would compute grouped heads by plain
products, with a score for each query and key (sdp_utils.cpp, check_batch_size_and_num_heads_dense).
The memory-efficient kernel serves there, once keys and values are repeated for every head.
"""

from __future__ import annotations

from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention


def dot_product(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """softmax(scale * query @ key + mask) @ value; causal where there is no mask.

    query [1, heads, Q, D]; key, value [1, kv heads, K, D]; mask [Q, K].
    """
    causal = mask is None
    if query.is_cuda and not can_use_flash_attention(
        SDPAParams(query, key, value, mask, 0.0, causal, True)
    ):
        key, value = (repeated(x, query.shape[1]) for x in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )


def repeated(keys: Tensor, heads: int) -> Tensor:
    """Each head of keys or values for all the queries' heads that read it: [1, heads, K, D]."""
    groups = keys.shape[1]
    return keys[:, :, None].expand(-1, -1, heads // groups, -1, -1).flatten(1, 2)
