"""Packed attention on the CPU, forward and backward of a whole pack in one piece.

The forward pass of each sequence is PyTorch's own flash kernel. Its backward pass is plain products
over blocks of queries: in bfloat16 PyTorch's takes two to four times as long
(docs/performance.md). It computes the same: weights and their gradient in fp32, never kept, made
again from queries and keys (FlashAttention, https://arxiv.org/abs/2205.14135, appendix B.4).

Rows are filled up, so that shapes come again (see rows.py). No query sees what fills: it stands
behind the last key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from plimsoll.model.rows import OF_SEQUENCES, up

SCORES = 2**20
"""Of a block of queries, over all heads: in fp32 they stay in the cache."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Span(NamedTuple):
    """A sequence of a pack: its own tokens, behind those of the first one that it shares."""

    own: slice
    shared: slice

    @property
    def queries(self) -> int:
        return int(self.own.stop - self.own.start)

    @property
    def before(self) -> int:
        """Keys before the first query."""
        return int(self.shared.stop - self.shared.start)


def spans(own: Sequence[int], shared: Sequence[int]) -> Iterator[Span]:
    """The sequences of a pack; own and shared as of `attention.Layout`."""
    start = first = 0
    for tokens, before in zip(own, shared, strict=True):
        first = first if before else start
        yield Span(slice(start, start + tokens), slice(first, first + before))
        start += tokens


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequence[Span], scale: float
) -> Tensor:
    """Causal attention of each sequence by itself.

    query [1, heads, T, D]; key, value [1, kv heads, T, D]. Gives [1, T, heads, D].
    Differentiable once.
    """
    output: Tensor = _PackedAttention.apply(query[0], key[0], value[0], sequences, scale)
    return output[None]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_HTD: Tensor,
        key_KTD: Tensor,
        value_KTD: Tensor,
        sequences: Sequence[Span],
        scale: float,
    ) -> Tensor:
        output_HTD = _by_token(query_HTD)
        for span in sequences:
            query = _queries(query_HTD, span)
            key, value = _keys(key_KTD, span), _keys(value_KTD, span)
            mask = _mask(query, key, span.before) if span.before else None
            output, _ = _flash(
                query[None], key[None], value[None], 0.0, mask is None, attn_mask=mask, scale=scale
            )
            output_HTD[:, span.own] = output[0, :, : span.queries]
        output_HTD[:, sequences[-1].own.stop :] = 0
        ctx.sequences, ctx.scale = sequences, scale
        ctx.save_for_backward(query_HTD, key_KTD, value_KTD)
        return output_HTD.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        query_HTD, key_KTD, value_KTD = inputs = ctx.saved_tensors
        grad_HTD = grad_THD.transpose(0, 1)
        grad_query, grad_key, grad_value = map(_by_token, inputs)
        for span in ctx.sequences:
            query, grad = _queries(query_HTD, span), _queries(grad_HTD, span)
            key, value = _keys(key_KTD, span), _keys(value_KTD, span)
            found = _backward(query, key, value, grad, span.before, ctx.scale)
            grad_query[:, span.own] = found[0][:, : span.queries]
            for total, part in ((grad_key, found[1]), (grad_value, found[2])):
                total[:, span.own] = part[:, span.before : span.before + span.queries]
                total[:, span.shared] += part[:, : span.before]
        for total in (grad_query, grad_key, grad_value):
            total[:, ctx.sequences[-1].own.stop :] = 0
        return grad_query, grad_key, grad_value, None, None


def _by_token(like_HTD: Tensor) -> Tensor:
    """An empty tensor of the same shape, in which a token's heads lie together."""
    heads, tokens, width = like_HTD.shape
    return like_HTD.new_empty(tokens, heads, width).transpose(0, 1)


def _queries(rows_HTD: Tensor, span: Span) -> Tensor:
    """The sequence's own rows, and zeros."""
    more = up(span.queries, OF_SEQUENCES) - span.queries
    return pad(rows_HTD[:, span.own], (0, 0, 0, more))


def _keys(rows_KTD: Tensor, span: Span) -> Tensor:
    """The rows of all that the sequence sees, and zeros: at least a key for each filled query."""
    rows = rows_KTD[:, span.own]
    if span.before:
        rows = torch.cat([rows_KTD[:, span.shared], rows], 1)
    keys = up(span.before + up(span.queries, OF_SEQUENCES), OF_SEQUENCES)
    return pad(rows, (0, 0, 0, keys - rows.shape[1]))


def _mask(query: Tensor, key: Tensor, before: int) -> Tensor:
    """0 where a query may look, -inf elsewhere."""
    mask = query.new_full((query.shape[1], key.shape[1]), float("-inf"))
    return mask.triu_(before + 1)


def _backward(
    query_HQD: Tensor,
    key_KND: Tensor,
    value_KND: Tensor,
    grad_HQD: Tensor,
    before: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values by that of the output, `before` keys before the
    first query.

    The heads that share keys lie one after the other, so that one product serves them all. Their
    scale is taken into the factors, which are smaller than the scores.
    """
    kv_heads, keys, width = key_KND.shape
    wide = torch.promote_types(query_HQD.dtype, torch.float32)
    key_wide, value_wide = (x.to(wide).transpose(1, 2) for x in (key_KND, value_KND))
    grad_query = torch.empty_like(query_HQD)
    grad_key = torch.zeros_like(key_KND, dtype=wide)
    grad_value = torch.zeros_like(grad_key)
    for block in _blocks(query_HQD, keys):
        seen = min(keys, up(before + block.stop, OF_SEQUENCES))
        query, grad = (x[:, block].reshape(kv_heads, -1, width) for x in (query_HQD, grad_HQD))
        scores = torch.bmm(query.to(wide) * scale, key_wide[:, :, :seen])
        _hide_later(scores.view(len(query_HQD), -1, seen), before + block.start)
        weights = torch.softmax(scores, -1)
        del scores
        grad_weights = torch.bmm(grad.to(wide) * scale, value_wide[:, :, :seen])
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, wide).to(query.dtype)
        grad_query[:, block] = torch.bmm(grad_scores, key_KND[:, :seen]).view_as(
            query_HQD[:, block]
        )
        grad_key[:, :seen] += torch.bmm(grad_scores.transpose(1, 2), query)
        grad_value[:, :seen] += torch.bmm(weights.to(grad.dtype).transpose(1, 2), grad)
    return grad_query, grad_key, grad_value


def _blocks(query_HQD: Tensor, keys: int) -> Iterator[slice]:
    """Queries whose scores fit into the cache."""
    heads, queries, _ = query_HQD.shape
    rows = max(1, SCORES // (heads * keys * OF_SEQUENCES)) * OF_SEQUENCES
    return (slice(start, min(start + rows, queries)) for start in range(0, queries, rows))


def _hide_later(scores_HMN: Tensor, first: int) -> None:
    """Of the keys from `first` on, the key of the block's first query, each sees one more."""
    queries, keys = scores_HMN.shape[1], scores_HMN.shape[2] - first
    scores_HMN[:, :, first:] += scores_HMN.new_full((queries, keys), float("-inf")).triu_(1)
