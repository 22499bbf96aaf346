"""Linear layers in 4 bits: NF4, Dettmers et al. 2023, https://arxiv.org/abs/2305.14314; by
bitsandbytes.

A quantised weight is a parameter of packed codes beside a `quant_state` with the scales of its
blocks. The codes are stored *as* the model's dtype (two, or four, bytes of codes make one
"number"): ZeRO divides and gathers parameters of one floating dtype, and would refuse bytes.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plimsoll.config.model import ModelConfig

# Whoever first imports it, PEFT among them, would see its advice on a faster kernel on stderr.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

HEADS = ("lm_head", "score")
"""Linear layers that are never quantised."""


def quantization_settings(config: ModelConfig, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` is told besides: nothing for a model that is not quantised."""
    if config.quantization == "none":
        return {}
    from transformers import BitsAndBytesConfig

    dtype = getattr(torch, config.dtype)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=config.double_quantization,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
        llm_int8_skip_modules=list(HEADS),
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def keep_codes_as_they_are(lm: PreTrainedModel) -> None:
    """Forbid bitsandbytes to lay weights out anew when a CPU scores: training on them, dividing
    them or reading them would then be wrong.
    """
    for module in lm.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def dequantised(parameter: nn.Parameter) -> Tensor:
    """The plain weight, in new memory, in the model's dtype; another parameter's own tensor."""
    scales = _scales(parameter)
    if scales is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(parameter.data, scales)
    return weight


def plain_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of the plain, whole weight, also where ZeRO-3 has taken the parameter apart."""
    scales = _scales(parameter)
    if scales is not None:
        return tuple(scales.shape)
    return tuple(parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape)


def _scales(parameter: nn.Parameter) -> Any:
    """bitsandbytes' `quant_state`; None where the parameter is not quantised."""
    return getattr(parameter, "quant_state", None)
