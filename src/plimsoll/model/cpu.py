"""Kernels for CPUs: packed attention with its own backward pass, and rows filled with zeros.

`use_cpu_kernels` makes a model use them; no other module names them.

The forward pass of each sequence is PyTorch's own flash kernel. The backward pass is plain products
over blocks of queries: weights and their gradient in fp32, never kept, made again from queries,
keys and each query's log-sum-exp (FlashAttention, https://arxiv.org/abs/2205.14135, appendix B.4).
PyTorch's backward pass takes three to five times as long in bfloat16.

oneDNN, which computes bfloat16 products on CPUs, compiles a kernel for every new shape: 3 to 15 ms
each, as long as several products of a small model. Packs hardly ever have equal sizes, so their
rows are filled with zeros up to a multiple, and the filling is cut off afterwards.

Short sequences of one shape are computed together. No query sees the filling: it stands behind the
last key.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from plimsoll.model.attention import SDPA, Attended, Span, register_kernel, sdpa
from plimsoll.model.logit_chunks import fill_rows
from plimsoll.model.sinks import share_with_sinks, sinks_gradient

NAME = "plimsoll_cpu"

SCORES = 2**20
"""Scores of a block of queries, over all heads: in fp32 they stay in the cache."""

ROWS = 1024
"""Queries of sequences that are computed together."""

OF_SEQUENCES = 32
"""Queries and keys of a sequence are filled up to a multiple of this."""

_LOG2_E = 1 / math.log(2)
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _round_up(rows: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `rows`."""
    return -(-rows // multiple) * multiple


def _use_packed_attention(lm: PreTrainedModel) -> None:
    """Have the layers use this kernel if the model's attention is PyTorch's, in place."""
    if lm.config._attn_implementation == SDPA:
        register_kernel(NAME, _kernel)
        lm.config._attn_implementation = NAME


def _kernel(pack: Attended) -> Tensor:
    """Return attention computed by this kernel if it can, otherwise by PyTorch's.

    PyTorch's kernel computes windows and softcaps, values of another width, and models that were
    moved to another device.
    """
    if (
        pack.query.device.type != "cpu"
        or pack.softcap is not None
        or pack.window_within(pack.layout.most_keys) is not None
        or pack.value.shape[-1] != pack.query.shape[-1]
    ):
        return sdpa(pack)
    return packed_attention(
        pack.query, pack.key, pack.value, pack.layout.spans, pack.scale, pack.sinks
    )


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequence[Span],
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention, in which each sequence attends only to itself, [1, T, heads, D].

    query [1, heads, T, D]; key, value [1, kv heads, T, D]; sinks [heads]. Differentiable once.
    """
    output: Tensor = _PackedAttention.apply(query[0], key[0], value[0], sinks, sequences, scale)
    return output[None]


class _Batch(NamedTuple):
    """Sequences that are computed together, filled with zeros to one shape.

    All have the same number of keys `before` the first query.
    """

    spans: Sequence[Span]
    before: int
    queries: int
    keys: int


def _batches(sequences: Sequence[Span], heads: int) -> Iterator[_Batch]:
    """Yield batches as large as SCORES and ROWS allow; leaders of shared tokens come first."""
    alike: defaultdict[tuple[int, int, int], list[Span]] = defaultdict(list)
    for span in sequences:
        queries = _round_up(span.queries, OF_SEQUENCES)
        alike[span.before, queries, _round_up(span.before + queries, OF_SEQUENCES)].append(span)
    for (before, queries, keys), spans_ in sorted(alike.items(), key=lambda item: item[0]):
        most = max(1, min(SCORES // (heads * queries * keys), ROWS // queries))
        for start in range(0, len(spans_), most):
            yield _Batch(spans_[start : start + most], before, queries, keys)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_HTD: Tensor,
        key_KTD: Tensor,
        value_KTD: Tensor,
        sinks_H: Tensor | None,
        sequences: Sequence[Span],
        scale: float,
    ) -> Tensor:
        output_HTD = _by_token(query_HTD, sequences[-1].own.stop)
        batches = tuple(_batches(sequences, len(query_HTD)))
        log_sums: list[Tensor] = []
        for batch in batches:
            query = _queries(query_HTD, batch)
            key, value = _keys(key_KTD, batch), _keys(value_KTD, batch)
            mask = None
            if batch.before:  # 0 where a query may look, -inf elsewhere
                mask = query.new_full((batch.queries, batch.keys), float("-inf"))
                mask.triu_(batch.before + 1)
            output, log_sum = _flash(
                query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale
            )
            if sinks_H is not None:
                log_sum = share_with_sinks(output, log_sum, sinks_H)
            log_sums.append(log_sum)
            for span, part in zip(batch.spans, output, strict=True):
                output_HTD[:, span.own] = part[:, : span.queries]
        ctx.sequences, ctx.batches, ctx.scale = sequences, batches, scale
        of_sinks = (None, None) if sinks_H is None else (sinks_H, output_HTD)
        ctx.save_for_backward(query_HTD, key_KTD, value_KTD, *of_sinks, *log_sums)
        return output_HTD.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        query_HTD, key_KTD, value_KTD, sinks_H, output_HTD, *log_sums = ctx.saved_tensors
        grad_HTD = grad_THD.transpose(0, 1)
        end = ctx.sequences[-1].own.stop
        grad_query = _by_token(query_HTD, end)
        has_more_keys = key_KTD.shape[1] > query_HTD.shape[1]  # of other ranks: nobody's own here
        end = 0 if has_more_keys else end
        grad_key, grad_value = _by_token(key_KTD, end), _by_token(value_KTD, end)
        wide = torch.promote_types(query_HTD.dtype, torch.float32)
        of_sinks: list[Tensor] = []
        for batch, log_sum in zip(ctx.batches, log_sums, strict=True):
            query, grad = (_queries(x, batch, wide) for x in (query_HTD, grad_HTD))
            key, value = (_keys(x, batch, wide) for x in (key_KTD, value_KTD))
            if ctx.needs_input_grad[3]:
                output = _queries(output_HTD, batch, wide)
                of_sinks.append(sinks_gradient(grad, output, log_sum, sinks_H).sum(0))
            with _narrow_products(query_HTD.dtype):
                grads = _backward(query, key, value, grad, log_sum, batch.before, ctx.scale)
            for span, query_part, key_part, value_part in zip(batch.spans, *grads, strict=True):
                grad_query[:, span.own] = query_part[:, : span.queries]
                for total, part in ((grad_key, key_part), (grad_value, value_part)):
                    total[:, span.keys] = part[:, span.before : span.before + span.queries]
                    start = 0
                    for rows in span.shared:
                        stop = start + rows.stop - rows.start
                        total[:, rows] += part[:, start:stop]
                        start = stop
        grad_sinks = torch.stack(of_sinks).sum(0).to(sinks_H.dtype) if of_sinks else None
        return grad_query, grad_key, grad_value, grad_sinks, None, None


@contextmanager
def _narrow_products(dtype: torch.dtype) -> Iterator[None]:
    """Let oneDNN round the factors of fp32 products to `dtype` inside the block, if it is bfloat16.

    This loses hardly anything: the factors were bfloat16 before, or are rounded to it for the next
    product, and sums stay in fp32. A machine with units for bfloat16 takes half the time.
    """
    backend: Any = torch.backends.mkldnn  # whose types leave this out
    settings = backend.matmul
    before = settings.fp32_precision
    if dtype == torch.bfloat16:
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _by_token(like_HTD: Tensor, end: int) -> Tensor:
    """Return a new tensor of the same shape in which a token's heads are adjacent.

    Its values are not set, except for zeros from the row `end` on.
    """
    heads, tokens, width = like_HTD.shape
    made_THD = like_HTD.new_empty(tokens, heads, width)
    made_THD[end:] = 0
    return made_THD.transpose(0, 1)


def _queries(rows_HTD: Tensor, batch: _Batch, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sequences' own rows, filled with zeros: [S, heads, Q, D]."""
    heads, _, width = rows_HTD.shape
    made = rows_HTD.new_zeros(len(batch.spans), heads, batch.queries, width, dtype=dtype)
    for rows, span in zip(made, batch.spans, strict=True):
        rows[:, : span.queries] = rows_HTD[:, span.own]
    return made


def _keys(rows_KTD: Tensor, batch: _Batch, dtype: torch.dtype | None = None) -> Tensor:
    """Return the rows that the sequences see, filled with zeros: [S, kv heads, K, D]."""
    heads, _, width = rows_KTD.shape
    made = rows_KTD.new_zeros(len(batch.spans), heads, batch.keys, width, dtype=dtype)
    for rows, span in zip(made, batch.spans, strict=True):
        start = 0
        for its_rows in (*span.shared, span.keys):
            stop = start + its_rows.stop - its_rows.start
            rows[:, start:stop] = rows_KTD[:, its_rows]
            start = stop
    return made


def _backward(
    query_SHQD: Tensor,
    key_SKND: Tensor,
    value_SKND: Tensor,
    grad_SHQD: Tensor,
    log_sums_SHQ: Tensor,
    before: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a batch's queries, keys and values, given that of its output.

    All tensors have the same dtype. Query heads that share a key head are adjacent, so a single
    product computes them together.
    """
    query_BQD, grad_BQD = query_SHQD.flatten(0, 1), grad_SHQD.flatten(0, 1)
    key_CND, value_CND = key_SKND.flatten(0, 1), value_SKND.flatten(0, 1)
    # Powers of 2: torch.exp is MKL's, whose first call in a process has now and then been computed
    # at half its precision by one of several threads.
    binary = scale * _LOG2_E
    minus_BQ1 = log_sums_SHQ.flatten(0, 1)[..., None] * -_LOG2_E
    grad_query = torch.empty_like(query_BQD)
    grad_key, grad_value = torch.zeros_like(key_CND), torch.zeros_like(value_CND)
    groups, keys, width = key_CND.shape
    for block in _blocks(query_BQD, keys):
        seen = slice(min(keys, _round_up(before + block.stop, OF_SEQUENCES)))
        key, value = key_CND[:, seen], value_CND[:, seen]
        query, grad = (x[:, block].reshape(groups, -1, width) for x in (query_BQD, grad_BQD))
        weights = torch.bmm(query, key.mT)
        by_head = weights.view(len(query_BQD), -1, seen.stop)
        torch.add(minus_BQ1[:, block], by_head, alpha=binary, out=by_head)
        by_head.exp2_().tril_(before + block.start)  # each query sees one key more
        scores = torch.bmm(grad, value.mT)  # their gradient, after the next line
        torch._softmax_backward_data(scores, weights, -1, scores.dtype, grad_input=scores)
        grad_query[:, block] = torch.bmm(scores, key).view_as(query_BQD[:, block])
        grad_key[:, seen].baddbmm_(scores.mT, query, alpha=scale)
        grad_value[:, seen].baddbmm_(weights.mT, grad)
    grad_query *= scale
    return (
        grad_query.view_as(query_SHQD),
        grad_key.view_as(key_SKND),
        grad_value.view_as(value_SKND),
    )


def _blocks(query_HQD: Tensor, keys: int) -> Iterator[slice]:
    heads, queries, _ = query_HQD.shape
    rows = max(1, SCORES // (heads * keys * OF_SEQUENCES)) * OF_SEQUENCES
    return (slice(start, min(start + rows, queries)) for start in range(0, queries, rows))


OF_PACKS = 64
"""The tokens of a pack, and its learned tokens, are filled up to a multiple of this."""


def use_cpu_kernels(lm: PreTrainedModel, device: torch.device) -> int:
    """Have a newly loaded model use these kernels, in place, if its device is a CPU.

    Return the number to a multiple of which the head must fill its rows.
    """
    if device.type != "cpu":
        return 1
    # The decoder's output keeps the rows of the filling.
    lm.get_decoder().register_forward_pre_hook(_fill, with_kwargs=True)
    _use_packed_attention(lm)
    return OF_PACKS


def _fill(_: nn.Module, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    rows = {name: named[name] for name in ("input_ids", "position_ids") if name in named}
    return given, named | {name: fill_rows(x_1T[0], OF_PACKS)[None] for name, x_1T in rows.items()}
