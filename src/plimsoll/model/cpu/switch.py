"""What is computed otherwise where a model runs on CPU; nothing else names these kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from plimsoll.model.cpu.attention import use_packed_attention
from plimsoll.model.cpu.gated import gated_mlp
from plimsoll.model.cpu.norms import llama_norm
from plimsoll.model.cpu.rows import OF_PACKS, fill_packs


def use_cpu_kernels(lm: PreTrainedModel, device: torch.device) -> int:
    """Have a model that was just loaded compute by the kernels for its device, in place.

    Gives the multiple that the head's rows are to be filled up to.
    """
    fuse_norms(lm)
    fuse_gates(lm)
    if device.type != "cpu":
        return 1
    fill_packs(lm.get_decoder())
    use_packed_attention(lm)
    return OF_PACKS


def fuse_norms(lm: nn.Module) -> None:
    """Have every norm that is written as Llama's compute as `rms_norm`; others stay as they are."""
    for module in lm.modules():
        if _is_written_as(module, LlamaRMSNorm.forward):
            _compute_by(llama_norm, module)


def fuse_gates(lm: nn.Module) -> None:
    """Have every MLP that is written as Llama's, with SiLU, compute by `gated`."""
    for module in lm.modules():
        if _is_written_as(module, LlamaMLP.forward) and isinstance(
            module.act_fn, nn.SiLU | SiLUActivation
        ):
            _compute_by(gated_mlp, module)


def _compute_by(forward: Callable[[Any, Tensor], Tensor], module: nn.Module) -> None:
    """In the module as quantised layers have theirs: class, names and weight stay, by which ZeRO-3,
    PEFT and transformers know it, and a deep copy's forward is bound to the copy."""
    module.forward = partial(forward, module)


def _is_written_as(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a module's class does what that function does: transformers' families have classes of
    their own, whose forwards are copies of Llama's where they do the same."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and _does(code) == _does(forward.__code__)


def _does(code: Any) -> tuple[Any, ...]:
    """Without the annotations, in which copies differ."""
    return code.co_code, code.co_consts, code.co_names
