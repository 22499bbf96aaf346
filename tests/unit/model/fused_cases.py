"""Helpers for tests of fused modules: which modules are fused, and what autograd keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, PreTrainedConfig

from plimsoll.model.fused import Fusion, fuse


def fused_in(config: PreTrainedConfig, fusions: Sequence[Fusion]) -> set[str]:
    """The names of a model's modules that are fused; its parameters keep theirs."""
    with torch.device("meta"):
        lm: Any = AutoModelForCausalLM.from_config(config)
    before = [name for name, _ in lm.named_parameters()]
    fuse(lm, fusions)
    assert [name for name, _ in lm.named_parameters()] == before
    return {name for name, module in lm.named_modules() if "forward" in vars(module)}


def kept_by(forward: Callable[[], object]) -> list[Tensor]:
    """Return what autograd saves of a forward."""
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return kept
