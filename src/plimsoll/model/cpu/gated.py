"""Llama's gated MLP with its activation and product as one function of autograd.

down(silu(gate(x)) * up(x)): Shazeer 2020, https://arxiv.org/abs/2002.05202, equation 6.
transformers' own keeps the activation too for the backward pass; this one makes it again, a few
rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from plimsoll.model.logit_chunks import block_elements

_silu_backward = torch.ops.aten.silu_backward.grad_input


def gated(gate_XI: Tensor, up_XI: Tensor) -> Tensor:
    """silu(gate) * up, rounded as its two operations are; of one shape and dtype. Differentiable
    once."""
    product_XI: Tensor = _Gated.apply(gate_XI, up_XI)
    return product_XI


def gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    """The forward of a `LlamaMLP` with SiLU."""
    down: Tensor = mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x)))
    return down


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_XI: Tensor, up_XI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_XI, up_XI)
        product_XI = torch.empty_like(up_XI, memory_format=torch.contiguous_format)
        for gate, up, product in _blocks(gate_XI, up_XI, product_XI):
            torch.mul(silu(gate), up, out=product)
        return product_XI

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_XI: Tensor) -> tuple[Tensor, Tensor]:
        gate_XI, up_XI = ctx.saved_tensors
        grad_gate_XI, grad_up_XI = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate_XI, up_XI)
        )
        for gate, up, grad, grad_gate, grad_up in _blocks(
            gate_XI, up_XI, grad_XI, grad_gate_XI, grad_up_XI
        ):
            torch.mul(grad, silu(gate), out=grad_up)
            _silu_backward(grad * up, gate, grad_input=grad_gate)
        return grad_gate_XI, grad_up_XI


def _blocks(*tensors_XI: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A part of each at a time, which on CPU stays in the cache."""
    size = block_elements(tensors_XI[0])
    return zip(*(x.reshape(-1).split(size) for x in tensors_XI), strict=True)
