"""Llama's norm as one function of autograd, in place of transformers' row of plain operations.

y = w * x / sqrt(mean(x^2) + epsilon): Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467,
equation 4. transformers' own keeps its input in fp32 and normalised for the backward pass; this one
keeps the input as it is, and an fp32 number for each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plimsoll.model.logit_chunks import block_elements


def rms_norm(input_XH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """w * x / sqrt(mean(x^2) + epsilon) along the last dimension, rounded as transformers does:
    normalised in fp32, then in the input's dtype, then multiplied by the weight.

    input_XH: of any number of dimensions, in any floating dtype, as the weight's own. The gradients
    are computed in fp32, and of the weight none where it is frozen.
    """
    output_XH: Tensor = _RmsNorm.apply(input_XH, weight_H, epsilon)
    return output_XH


def llama_norm(norm: Any, hidden_states: Tensor) -> Tensor:
    """The forward of a `LlamaRMSNorm`."""
    return rms_norm(hidden_states, norm.weight, norm.variance_epsilon)


class _RmsNorm(torch.autograd.Function):
    """Block of rows by block, so that what is in fp32 stays small, and on CPU in the cache."""

    @staticmethod
    def forward(ctx: Any, input_XH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        input_TH = input_XH.reshape(-1, input_XH.shape[-1])
        dtype = torch.promote_types(input_XH.dtype, weight_H.dtype)
        output_TH = input_TH.new_empty(input_TH.shape, dtype=dtype)
        inverses: list[Tensor] = []
        for input_NH, output_NH in _blocks(input_TH, output_TH):
            wide_NH = input_NH.float()
            inverse_N1 = torch.rsqrt(wide_NH.pow(2).mean(-1, keepdim=True) + epsilon)
            normal_NH = (wide_NH * inverse_N1).to(input_NH.dtype)
            torch.mul(normal_NH, weight_H, out=output_NH)
            inverses.append(inverse_N1)
        ctx.save_for_backward(input_XH, weight_H, torch.cat(inverses))
        return output_TH.view(input_XH.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_XH: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input_XH, weight_H, inverse_T1 = ctx.saved_tensors
        of_input, of_weight, _ = ctx.needs_input_grad
        input_TH = input_XH.reshape(-1, input_XH.shape[-1])
        grad_TH = grad_XH.reshape(input_TH.shape)
        # The gradients; of the input with no columns where it is not wanted.
        made_TH = input_TH.new_empty(input_TH.shape if of_input else (len(input_TH), 0))
        wide_H = weight_H.float()
        made_H = torch.zeros_like(wide_H)
        for input_NH, grad_NH, inverse_N1, made_NH in _blocks(
            input_TH, grad_TH, inverse_T1, made_TH
        ):
            wide_NH, slope_NH = input_NH.float(), grad_NH.float()
            both_NH = slope_NH * wide_NH
            if of_weight:
                made_H.addmv_(both_NH.T, inverse_N1[:, 0])
            if of_input:
                # grad * w / rms, less what of it lies along the input
                along_N1 = (both_NH @ wide_H)[:, None] * inverse_N1.pow(3) / len(wide_H)
                torch.mul(slope_NH, wide_H, out=both_NH).mul_(inverse_N1)
                made_NH.copy_(both_NH.addcmul_(wide_NH, along_N1, value=-1))
        input_grad_XH = made_TH.view(input_XH.shape) if of_input else None
        return input_grad_XH, made_H.to(weight_H.dtype) if of_weight else None, None


def _blocks(*tensors_TX: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A few rows of each at a time, by how many fit of the first."""
    first_TH = tensors_TX[0]
    rows = max(1, block_elements(first_TH) // first_TH.shape[1])
    return zip(*(tensor_TX.split(rows) for tensor_TX in tensors_TX), strict=True)
