"""Switch a model to the kernels for CPUs; nothing else names these kernels.

oneDNN, which computes bfloat16 products on CPUs, compiles a kernel for every new shape: 3 to 15 ms
each, as long as several products of a small model. Packs hardly ever have equal sizes, so their
rows are filled with zeros up to a multiple, and the filling is cut off afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from plimsoll.model.cpu.attention import use_packed_attention
from plimsoll.model.logit_chunks import fill_rows

OF_PACKS = 64
"""The tokens of a pack, and its learned tokens, are filled up to a multiple of this."""


def use_cpu_kernels(lm: PreTrainedModel, device: torch.device) -> int:
    """Have a newly loaded model use the kernels for CPUs, in place, if its device is a CPU.

    Return the multiple that the head's rows are to be filled up to.
    """
    if device.type != "cpu":
        return 1
    # The decoder's output keeps the rows of the filling.
    lm.get_decoder().register_forward_pre_hook(_fill, with_kwargs=True)
    use_packed_attention(lm)
    return OF_PACKS


def _fill(_: nn.Module, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    rows = {name: named[name] for name in ("input_ids", "position_ids") if name in named}
    return given, named | {name: fill_rows(x_1T[0], OF_PACKS)[None] for name, x_1T in rows.items()}
