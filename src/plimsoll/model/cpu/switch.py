"""What is computed otherwise where a model runs on CPU; nothing else names these kernels.

Numbers of rows come again: oneDNN, which computes bfloat16 products on CPUs, compiles a kernel for
every new shape: 3 to 15 ms each, as long as several products of a small model. Hardly two packs are
of one size, so their rows are filled with zeros up to a multiple; what those rows give is cut off.
With AMX the products of a step of SFT of 28M parameters took 487 instead of 683 ms; an AMD EPYC
without it compiles less, and the zeros cost 3 % of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from plimsoll.model.cpu.attention import use_packed_attention
from plimsoll.model.logit_chunks import filled

OF_PACKS = 64
"""Tokens of a pack, and learned ones, are a multiple of it."""


def use_cpu_kernels(lm: PreTrainedModel, device: torch.device) -> int:
    """Have a model that was just loaded compute by the kernels for CPUs, in place; on another
    device it stays as it is.

    Gives the multiple that the head's rows are to be filled up to.
    """
    if device.type != "cpu":
        return 1
    # The output has rows for what fills, too.
    lm.get_decoder().register_forward_pre_hook(_fill, with_kwargs=True)
    use_packed_attention(lm)
    return OF_PACKS


def _fill(_: nn.Module, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    rows = {name: named[name] for name in ("input_ids", "position_ids") if name in named}
    return given, named | {name: filled(x_1T[0], OF_PACKS)[None] for name, x_1T in rows.items()}
