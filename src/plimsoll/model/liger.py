"""Norms, gated MLPs and rotary embeddings by Liger's Triton kernels, one kernel each way.

Hsu et al. 2024, https://arxiv.org/abs/2410.10989. Only gate and up of an MLP are overwritten.
Liger's norms would also write their gradient over the incoming one, which a residual may share, and
its rotary embeddings over queries and keys, which selective checkpointing keeps: these get new
tensors here.

PyTorch's own `torch.rms_norm` is one kernel too and saves as much, but it rounds once, after the
weight. Llama in transformers and in vLLM rounds before the weight as well, and so does Liger.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any

import torch
from liger_kernel.ops.geglu import geglu_backward, geglu_forward
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import rope_backward, rope_forward
from liger_kernel.ops.swiglu import swiglu_backward, swiglu_forward
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import GELUTanh
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    rotate_half,
)

from plimsoll.errors import PlimsollError
from plimsoll.model import fused
from plimsoll.model.fused import (
    Forward,
    Fusion,
    fusion_of,
    gated_mlp,
    has_code_of,
    has_silu,
    llama_norm,
)

_WIDEST = 65536
"""The widest row that a kernel takes as one block.

See liger_kernel/ops/utils.py, `calculate_settings`.
"""
_ROTARY = "apply_rotary_pos_emb"
"""The name by which attention's forward finds the function in its module."""


def rms_norm(input_XH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Return w * x / sqrt(mean(x^2) + epsilon), rounded as in Llama, by Liger's kernel.

    If weight and input differ in dtype, `fused.rms_norm` itself computes it: Liger would round the
    result to the input's dtype.
    """
    if input_XH.dtype != weight_H.dtype:
        return fused.rms_norm(input_XH, weight_H, epsilon)
    output_XH: Tensor = LigerRMSNormFunction.apply(input_XH, weight_H, epsilon, 0.0, "llama", False)
    return output_XH


def offset_rms_norm(input_XH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Return (1 + w) * x / sqrt(mean(x^2) + epsilon) in fp32, then rounded, as Gemma does."""
    output_XH: Tensor = LigerRMSNormFunction.apply(input_XH, weight_H, epsilon, 1.0, "gemma", False)
    return output_XH


def wide_rms_norm(input_XH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Return w * x / sqrt(mean(x^2) + epsilon) in fp32, then rounded, as gpt-oss does."""
    output_XH: Tensor = LigerRMSNormFunction.apply(input_XH, weight_H, epsilon, 0.0, "gemma", False)
    return output_XH


def silu_gate(gate_XI: Tensor, up_XI: Tensor) -> Tensor:
    """Return silu(gate) * up, by Liger's kernel.

    It is differentiable only once, even with retain_graph.
    """
    product_XI: Tensor = _LigerGate.apply(gate_XI, up_XI, swiglu_forward, swiglu_backward)
    return product_XI


def gelu_gate(gate_XI: Tensor, up_XI: Tensor) -> Tensor:
    """Return gelu(gate) * up, with the tanh approximation; otherwise like `silu_gate`."""
    product_XI: Tensor = _LigerGate.apply(gate_XI, up_XI, geglu_forward, geglu_backward)
    return product_XI


class _LigerGate(torch.autograd.Function):
    """An activated gate times up. The backward pass overwrites both, which nothing else reads."""

    @staticmethod
    def forward(ctx: Any, gate_XI: Tensor, up_XI: Tensor, forward: Any, backward: Any) -> Tensor:
        *kept, product_XI = forward(gate_XI.contiguous(), up_XI.contiguous())
        ctx.save_for_backward(*kept)
        ctx.backward, ctx.spent = backward, False
        return product_XI  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_XI: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.spent:
            raise PlimsollError(
                "A second backward pass went through a gated MLP of Liger's kernels. The first "
                "pass overwrote the tensors that the MLP had kept. Run one backward pass for each "
                "forward pass, or uninstall liger-kernel: Plimsoll's own functions then take its "
                "place, and allow several."
            )
        ctx.spent = True
        return *ctx.backward(*ctx.saved_tensors, grad_XI.contiguous()), None, None


def rotate(
    queries_1HTD: Tensor, keys_1HTD: Tensor, cos_1TD: Tensor, sin_1TD: Tensor, heads_at: int = 1
) -> tuple[Tensor, Tensor]:
    """Return queries and keys with rotary embeddings, like Llama's `apply_rotary_pos_emb`.

    Su et al. 2021, https://arxiv.org/abs/2104.09864. If the tables have a dtype or form that the
    kernel cannot use, transformers' function is called.
    """
    dtypes = {x.dtype for x in (queries_1HTD, keys_1HTD, cos_1TD, sin_1TD)}
    rotated: tuple[Tensor, Tensor]
    if len(dtypes) > 1 or cos_1TD.ndim != 3 or heads_at != 1:
        rotated = apply_rotary_pos_emb(queries_1HTD, keys_1HTD, cos_1TD, sin_1TD, heads_at)
    else:
        rotated = _Rotated.apply(queries_1HTD, keys_1HTD, cos_1TD, sin_1TD)
    return rotated


class _Rotated(torch.autograd.Function):
    """Rotary embeddings of queries and keys, on copies, as Liger's kernel overwrites its inputs."""

    @staticmethod
    def forward(
        ctx: Any, queries_1HTD: Tensor, keys_1HTD: Tensor, cos_1TD: Tensor, sin_1TD: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_1TD, sin_1TD)
        queries, keys, *_ = rope_forward(_copy(queries_1HTD), _copy(keys_1HTD), cos_1TD, sin_1TD)
        return queries, keys

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_queries_1HTD: Tensor, grad_keys_1HTD: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        copies = _copy(grad_queries_1HTD), _copy(grad_keys_1HTD)
        return *rope_backward(*copies, *ctx.saved_tensors), None, None


def _copy(heads_1HTD: Tensor) -> Tensor:
    """Return a copy of the heads in the memory layout that the kernel needs: token after token."""
    tokens_1THD = heads_1HTD.transpose(1, 2)
    return tokens_1THD.clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _rotary(attention: nn.Module) -> Forward | None:
    """Return a copy of an attention's forward that calls `rotate` for `apply_rotary_pos_emb`.

    The result is None unless that function and `rotate_half` have the code of Llama's.
    """
    forward = type(attention).forward
    names = getattr(forward, "__globals__", {})
    called = _ROTARY in getattr(getattr(forward, "__code__", None), "co_names", ())
    alike = has_code_of(names.get(_ROTARY), apply_rotary_pos_emb)
    if not (called and alike and has_code_of(names.get("rotate_half"), rotate_half)):
        return None
    new = FunctionType(forward.__code__, names | {_ROTARY: rotate}, argdefs=forward.__defaults__)
    new.__kwdefaults__ = forward.__kwdefaults__
    return new


def _offset_norm(norm: Any, x: Tensor) -> Tensor:
    return offset_rms_norm(x, norm.weight, norm.eps)


def _is_narrow(norm: Any) -> bool:
    return len(norm.weight) <= _WIDEST


def _is_gemmas(norm: Any) -> bool:
    """Return whether a norm computes as Gemma's and is narrow enough for the kernel."""
    return has_code_of(type(norm)._norm, GemmaRMSNorm._norm) and _is_narrow(norm)


def _is_inner_narrow(mlp: Any) -> bool:
    """Return whether the MLP's inner width fits in one block of the kernel."""
    return bool(mlp.gate_proj.out_features <= _WIDEST)


FUSIONS: tuple[Fusion, ...] = (
    fusion_of(LlamaRMSNorm.forward, partial(llama_norm, rms_norm), _is_narrow),
    fusion_of(GptOssRMSNorm.forward, partial(llama_norm, wide_rms_norm), _is_narrow),
    fusion_of(GemmaRMSNorm.forward, _offset_norm, _is_gemmas),
    fusion_of(
        LlamaMLP.forward,
        partial(gated_mlp, silu_gate),
        lambda mlp: has_silu(mlp) and _is_inner_narrow(mlp),
    ),
    fusion_of(
        LlamaMLP.forward,
        partial(gated_mlp, gelu_gate),
        lambda mlp: isinstance(mlp.act_fn, GELUTanh) and _is_inner_narrow(mlp),
    ),
    _rotary,
    *fused.FUSIONS,
)
"""Fusions of modules by Liger's kernels, and ours for modules that are too wide for a kernel."""
