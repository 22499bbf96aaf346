"""Flash attention of packed sequences by plain products: the CPU has no kernel of this name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]

_touch: Kernel = torch.ops.fakecard.touch
_to_card: Kernel = torch.ops.fakecard.to_card
_on_host: Kernel = torch.ops.fakecard.alias


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a pack: its queries, its keys, and the mask of what queries do not see."""

    queries: slice
    keys: slice
    hidden_QK: Tensor


def _sequences(
    query_ends: Tensor, key_ends: Tensor, causal: bool, left: int | None, right: int | None
) -> Iterator[_Sequence]:
    """Yield a pack's sequences; the last query of a sequence sees its last key."""
    for (a, b), (c, d) in zip(pairwise(_list(query_ends)), pairwise(_list(key_ends)), strict=True):
        place = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        key = torch.arange(d - c)[None]
        hidden = torch.zeros(b - a, d - c, dtype=torch.bool)
        if causal or (right is not None and right >= 0):
            hidden |= key > place + (0 if causal else right or 0)
        if left is not None and left >= 0:
            hidden |= key < place - left
        yield _Sequence(slice(a, b), slice(c, d), hidden)


def _list(ends: Tensor) -> list[int]:
    assert ends.is_cuda and ends.dtype == torch.int32, "cu_seqlens must be int32 on the card"
    numbers: list[int] = _on_host(ends).tolist()
    return numbers


def _heads(tensor: Tensor, rows: slice, groups: int) -> Tensor:
    """Return a sequence's rows of a [T, heads, D] in float32 as [heads, T, D]."""
    return tensor[rows].float().repeat_interleave(groups, 1).transpose(0, 1)


def _probabilities(q: Tensor, k: Tensor, scale: float, hidden: Tensor) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1), scores.logsumexp(-1)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    """Compute `_flash_attention_forward`, after the checks that CUDA's kernel makes."""
    inputs = (query, key, value, query_ends, key_ends)
    for tensor in inputs:
        assert tensor.is_cuda, f"flash attention got a tensor of {tensor.device}"
        _touch(tensor, False, "flash_attention")
    assert query.dtype in (torch.float16, torch.bfloat16), f"flash attention got {query.dtype}"
    assert query.dtype == key.dtype == value.dtype and query.stride(-1) == 1
    assert query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    for ends, longest, tensor in ((query_ends, longest_query, query), (key_ends, longest_key, key)):
        numbers = _list(ends)
        assert max(b - a for a, b in pairwise(numbers)) <= longest and numbers[-1] <= len(tensor)
    q, k, v = map(_on_host, (query, key, value))
    groups, factor = _groups(q, k), _scale(q, scale)
    output = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    sums = []
    window = window_size_left, window_size_right
    for part in _sequences(query_ends, key_ends, causal, *window):
        weights, logsumexp = _probabilities(
            _heads(q, part.queries, 1), _heads(k, part.keys, groups), factor, part.hidden_QK
        )
        output[part.queries] = (weights @ _heads(v, part.keys, groups)).transpose(0, 1).to(q.dtype)
        sums.append(logsumexp)
    unused = torch.empty(0, device=query.device)
    seed = torch.zeros(2, dtype=torch.int64, device=query.device)
    made = partial(_to_card, name="flash_attention")
    return made(output), made(torch.cat(sums, 1)), seed, unused, unused


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    causal: bool,
    seed: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """Compute `_flash_attention_backward`: the gradients of queries, keys and values."""
    for tensor in (gradient, query, key, value, output, logsumexp, seed):
        assert tensor.is_cuda, f"flash attention's backward pass got a tensor of {tensor.device}"
        _touch(tensor, False, "flash_attention_backward")
    g, q, k, v, o, sums = map(_on_host, (gradient, query, key, value, output, logsumexp))
    groups, factor = _groups(q, k), _scale(q, scale)
    of_q, of_k, of_v = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (q, k, v))
    for part in _sequences(query_ends, key_ends, causal, window_size_left, window_size_right):
        g_part, q_part = _heads(g, part.queries, 1), _heads(q, part.queries, 1)
        k_part, v_part = _heads(k, part.keys, groups), _heads(v, part.keys, groups)
        scores = (q_part @ k_part.transpose(1, 2) * factor).masked_fill(part.hidden_QK, -torch.inf)
        weights = (scores - sums[:, part.queries, None]).exp()  # as CUDA's kernel makes them again
        of_weights = g_part @ v_part.transpose(1, 2)
        along = (g_part * _heads(o, part.queries, 1)).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - along) * factor
        of_q[part.queries] += (of_scores @ k_part).transpose(0, 1)
        of_k[part.keys] += _add_groups(of_scores.transpose(1, 2) @ q_part, groups)
        of_v[part.keys] += _add_groups(weights.transpose(1, 2) @ g_part, groups)
    return tuple(_to_card(x.to(q.dtype), "flash_attention_backward") for x in (of_q, of_k, of_v))


def _groups(query: Tensor, key: Tensor) -> int:
    """Return how many heads of queries share one of keys."""
    return query.shape[1] // key.shape[1]


def _scale(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _add_groups(per_head: Tensor, groups: int) -> Tensor:
    """Add up the gradients [heads, T, D] of heads that share keys; return [T, key heads, D]."""
    by_key: Tensor = per_head.transpose(0, 1).unflatten(1, (-1, groups))
    return by_key.sum(2)
