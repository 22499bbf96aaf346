"""Attention sinks, as in gpt-oss: a score of each head that takes a share of its attention.

A sink is a further key, which every query sees, with a value of 0. So attention with a sink is
attention without, times the share of the other keys: with lse the log-sum-exp of a query's scores,
lse' = log(exp(lse) + exp(sink)) and o' = o exp(lse - lse'). Flash attention's own backward pass
(https://arxiv.org/abs/2205.14135, appendix B.4) reads only o' and lse', so its gradients of
queries, keys and values are exact if it gets these two. The sink's gradient is that of the score of
a key with a value of 0: -sum_t exp(sink - lse'_t) (do'_t . o'_t).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.attention.varlen  # makes its operations known
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

_STEP = 8
"""Kernels for cards take heads of a multiple of this many dimensions."""


def share_with_sinks(output_XHTD: Tensor, log_sums_XHT: Tensor, sinks_H: Tensor) -> Tensor:
    """Take the sinks' shares from an output of attention, in place.

    Return the log-sum-exps of each query's scores with its head's sink.
    """
    shared_XHT = torch.logaddexp(log_sums_XHT, sinks_H.to(log_sums_XHT.dtype)[:, None])
    output_XHTD.mul_((log_sums_XHT - shared_XHT).exp_()[..., None])
    return shared_XHT


def sinks_gradient(
    grad_XHTD: Tensor, output_XHTD: Tensor, shared_XHT: Tensor, sinks_H: Tensor
) -> Tensor:
    """Return the sinks' gradient, [X, heads], from the tensors of `share_with_sinks`."""
    wide = shared_XHT.dtype
    weights_XHT = (sinks_H.to(wide)[:, None] - shared_XHT).exp_()
    return (weights_XHT * (grad_XHTD.to(wide) * output_XHTD).sum(-1)).sum(-1).neg_()


class VarlenWithSinks(torch.autograd.Function):
    """torch's attention of packs (`varlen_attn`) with sinks.

    It calls the private operations that `varlen_attn` consists of, because `varlen_attn` ignores
    the gradient of the log-sum-exp that it returns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_KGD: Tensor,
        value_KGD: Tensor,
        sinks_H: Tensor,
        places: tuple[Tensor, Tensor, int, int],
        form: Mapping[str, Any],
        grouped: Mapping[str, Any],
    ) -> Tensor:
        """Return the output, [T, heads, D].

        Args:
            ctx: autograd's.
            query_THD: as `varlen_attn` takes it, and so key and value.
            key_KGD: see query_THD.
            value_KGD: see query_THD.
            sinks_H: the sinks.
            places: the borders of queries and keys, and the longest of each.
            form: the keywords of both operations: `is_causal`, `scale`, `window_size`.
            grouped: the keywords of the forward operation alone.
        """
        output_THD, log_sums_HT, state = torch.ops.torch_attn._varlen_attn(
            query_THD, key_KGD, value_KGD, *places, **form, **grouped
        )
        shared_HT = share_with_sinks(output_THD.transpose(0, 1), log_sums_HT, sinks_H)
        ctx.save_for_backward(
            query_THD, key_KGD, value_KGD, sinks_H, output_THD, shared_HT, state, *places[:2]
        )
        ctx.longest, ctx.form = places[2:], form
        return output_THD  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys, values and sinks."""
        query, key, value, sinks_H, output_THD, shared_HT, state, *borders = ctx.saved_tensors
        gradients = torch.ops.torch_attn._varlen_attn_backward(
            grad_THD,
            query,
            key,
            value,
            output_THD,
            shared_HT,
            *borders,
            *ctx.longest,
            rng_state=state,
            **ctx.form,
        )
        grad_sinks_H = None
        if ctx.needs_input_grad[3]:
            grad_HTD, output_HTD = (x.transpose(0, 1) for x in (grad_THD, output_THD))
            wide_H = sinks_gradient(grad_HTD, output_HTD, shared_HT, sinks_H)
            grad_sinks_H = wide_H.to(sinks_H.dtype)
        return *gradients, grad_sinks_H, None, None, None


def as_keys(
    query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values for a kernel that has no sinks: a first key stands for them.

    All are [1, heads, rows, dimensions], and widened: the queries hold the sink of their head in
    further dimensions, which only the first key reads. Its value is 0. Values are filled up to the
    queries' width, which kernels demand.
    """
    width = query.shape[-1]
    wide = width + _STEP
    sinks = sinks_H.to(query.dtype)[None, :, None, None].expand(-1, -1, query.shape[2], 2)
    query = pad(torch.cat([query, sinks], -1), (0, _STEP - 2))
    # The kernel multiplies by the scale: so divide by it, in two parts that bfloat16 can hold.
    sink_key = key.new_zeros(*key.shape[:2], 1, wide)
    most = float(torch.tensor(1 / scale, dtype=key.dtype, device="cpu"))
    sink_key[..., width], sink_key[..., width + 1] = most, 1 / scale - most
    key = torch.cat([sink_key, pad(key, (0, _STEP))], 2)
    return query, key, pad(value, (0, wide - value.shape[-1], 1, 0))
