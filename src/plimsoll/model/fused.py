"""Llama's norm and gated MLP as autograd functions that keep less, on any device.

A norm keeps its input and an fp32 number for each row, whereas transformers keeps the input in fp32
and again normalised. A gated MLP recomputes its activation instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from plimsoll.model.logit_chunks import block_elements

_silu_backward = torch.ops.aten.silu_backward.grad_input


Forward = Callable[..., Any]
"""The forward of a module; the module is its first argument."""
Fusion = Callable[[nn.Module], Forward | None]
"""Returns the new forward of a module, or None for a module of another kind."""


def fuse(lm: nn.Module, fusions: Sequence[Fusion]) -> None:
    """Replace the forward of each module by that of the first fusion that matches, in place.

    The forward is set as an attribute of the module, as for quantised layers. So the module keeps
    its class, names and weight, by which ZeRO-3, PEFT and transformers recognise it, and a deep
    copy's forward is bound to the copy.
    """
    for module in lm.modules():
        forward = next(filter(None, (fusion(module) for fusion in fusions)), None)
        if forward is not None:
            module.forward = partial(forward, module)


def fusion_of(
    like: Forward, forward: Forward, fits: Callable[[Any], bool] = lambda module: True
) -> Fusion:
    """Return a fusion that gives a module `forward` if its class's forward has the code of `like`.

    The module must also fulfil `fits`. The code is compared, because each family in transformers
    has its own classes; their forwards are copies of Llama's if they compute the same.
    """

    def fusion(module: nn.Module) -> Forward | None:
        return forward if has_code_of(type(module).forward, like) and fits(module) else None

    return fusion


def has_code_of(function: object, like: Forward) -> bool:
    """Return whether `function` has the same bytecode as `like`."""
    code = getattr(function, "__code__", None)
    return code is not None and _code(code) == _code(like.__code__)


def _code(code: Any) -> tuple[Any, ...]:
    """Return the parts of a code object that are equal in copies; annotations may differ."""
    return code.co_code, code.co_consts, code.co_names


def has_silu(mlp: Any) -> bool:
    """Return whether a gated MLP's activation is SiLU."""
    return isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)


def llama_norm(
    normalise: Callable[[Tensor, Tensor, float], Tensor], norm: Any, hidden_states: Tensor
) -> Tensor:
    """Return a norm's output, computed by `normalise`; the norm has the attributes of Llama's."""
    return normalise(hidden_states, norm.weight, norm.variance_epsilon)


def gated_mlp(gate: Callable[[Tensor, Tensor], Tensor], mlp: Any, x: Tensor) -> Tensor:
    """Return a gated MLP's output; `gate` computes the activation and the product in one."""
    down: Tensor = mlp.down_proj(gate(mlp.gate_proj(x), mlp.up_proj(x)))
    return down


def rms_norm(input_XH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Return w * x / sqrt(mean(x^2) + epsilon) along the last dimension.

    Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467, equation 4, rounded as transformers
    does: normalised in fp32, then in the input's dtype, then multiplied by the weight, which may
    have another. The gradients are computed in fp32; a frozen weight has none.
    """
    output_XH: Tensor = _RmsNorm.apply(input_XH, weight_H, epsilon)
    return output_XH


class _RmsNorm(torch.autograd.Function):
    """Works on blocks of rows, so that few fp32 values exist at once (on a CPU, in the cache)."""

    @staticmethod
    def forward(ctx: Any, input_XH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        input_TH = input_XH.reshape(-1, input_XH.shape[-1])
        dtype = torch.promote_types(input_XH.dtype, weight_H.dtype)
        output_TH = input_TH.new_empty(input_TH.shape, dtype=dtype)
        inverses: list[Tensor] = []
        for input_NH, output_NH in _row_blocks(input_TH, output_TH):
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
        # The gradients; the input's has no columns if it is not needed.
        made_TH = input_TH.new_empty(input_TH.shape if of_input else (len(input_TH), 0))
        wide_H = weight_H.float()
        made_H = torch.zeros_like(wide_H)
        for input_NH, grad_NH, inverse_N1, made_NH in _row_blocks(
            input_TH, grad_TH, inverse_T1, made_TH
        ):
            wide_NH, slope_NH = input_NH.float(), grad_NH.float()
            both_NH = slope_NH * wide_NH
            if of_weight:
                made_H.addmv_(both_NH.T, inverse_N1[:, 0])
            if of_input:
                # grad * w / rms, less its component along the input
                along_N1 = (both_NH @ wide_H)[:, None] * inverse_N1.pow(3) / len(wide_H)
                torch.mul(slope_NH, wide_H, out=both_NH).mul_(inverse_N1)
                made_NH.copy_(both_NH.addcmul_(wide_NH, along_N1, value=-1))
        input_grad_XH = made_TH.view(input_XH.shape) if of_input else None
        return input_grad_XH, made_H.to(weight_H.dtype) if of_weight else None, None


def _row_blocks(*tensors_TX: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return blocks of rows of each tensor; the first tensor decides how many rows fit."""
    first_TH = tensors_TX[0]
    rows = max(1, block_elements(first_TH) // first_TH.shape[1])
    return zip(*(tensor_TX.split(rows) for tensor_TX in tensors_TX), strict=True)


def silu_gate(gate_XI: Tensor, up_XI: Tensor) -> Tensor:
    """Return silu(gate) * up, rounded after each of the two operations. Differentiable once.

    Both inputs have the same shape and dtype. Shazeer 2020, https://arxiv.org/abs/2002.05202,
    equation 6.
    """
    product_XI: Tensor = _SiluGate.apply(gate_XI, up_XI)
    return product_XI


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_XI: Tensor, up_XI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_XI, up_XI)
        product_XI = torch.empty_like(up_XI, memory_format=torch.contiguous_format)
        for gate, up, product in _flat_blocks(gate_XI, up_XI, product_XI):
            torch.mul(silu(gate), up, out=product)
        return product_XI

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_XI: Tensor) -> tuple[Tensor, Tensor]:
        gate_XI, up_XI = ctx.saved_tensors
        grad_gate_XI, grad_up_XI = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate_XI, up_XI)
        )
        for gate, up, grad, grad_gate, grad_up in _flat_blocks(
            gate_XI, up_XI, grad_XI, grad_gate_XI, grad_up_XI
        ):
            torch.mul(grad, silu(gate), out=grad_up)
            _silu_backward(grad * up, gate, grad_input=grad_gate)
        return grad_gate_XI, grad_up_XI


def _flat_blocks(*tensors_XI: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return parts of each tensor that stay in the cache on CPU."""
    size = block_elements(tensors_XI[0])
    return zip(*(x.reshape(-1).split(size) for x in tensors_XI), strict=True)


NORM = fusion_of(LlamaRMSNorm.forward, partial(llama_norm, rms_norm))
"""Fuses Llama's norm by `rms_norm`."""
GATE = fusion_of(LlamaMLP.forward, partial(gated_mlp, silu_gate), has_silu)
"""Fuses Llama's MLP with SiLU by `silu_gate`."""
FUSIONS: tuple[Fusion, ...] = (NORM, GATE)
