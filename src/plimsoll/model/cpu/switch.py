"""What is computed otherwise where a model runs on CPU; nothing else names these kernels."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from plimsoll.model.cpu.attention import use_packed_attention
from plimsoll.model.cpu.row_counts import OF_PACKS, fill_packs


def use_cpu_kernels(lm: PreTrainedModel, device: torch.device) -> int:
    """Have a model that was just loaded compute by the kernels for CPUs, in place; on another
    device it stays as it is.

    Gives the multiple that the head's rows are to be filled up to.
    """
    if device.type != "cpu":
        return 1
    fill_packs(lm.get_decoder())
    use_packed_attention(lm)
    return OF_PACKS
