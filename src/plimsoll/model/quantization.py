"""Linear layers in 4 bits by bitsandbytes: NF4, Dettmers et al. 2023, arXiv 2305.14314.

A quantised weight is a parameter of packed codes beside a `quant_state` with the scales of its
blocks. The codes are stored *as* the model's dtype (two, or four, bytes of codes make one
"number"): ZeRO divides and gathers parameters of one floating dtype, and would refuse bytes.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from plimsoll.config.engine import ModelConfig

# Its first import, by PEFT for example, would print advice on a faster kernel on stderr.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

HEADS = ("lm_head", "score")
"""Linear layers that are never quantised."""


def quantization_settings(config: ModelConfig, device: torch.device) -> dict[str, Any]:
    """Return the arguments by which `from_pretrained` quantises a model; empty if it should not."""
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


def leave_files(lm: PreTrainedModel) -> None:
    """Copy the parameters that are not in 4 bits into memory, so that no file stays mapped.

    A single weight that is still mapped would keep all pages of the file in the process, including
    those of the weights that were read to be quantised.
    """
    for parameter in lm.parameters():
        if _scales(parameter) is None:
            parameter.data = parameter.data.clone()


def multiply_by_codes(lm: PreTrainedModel) -> None:
    """Have the quantised layers compute by `_ByCodes`, in place of bitsandbytes' own forward.

    bitsandbytes' forward changes the layout of the weights when a CPU scores. Training, dividing or
    reading these weights would then be wrong.
    """
    for module in lm.modules():
        if _scales(getattr(module, "weight", None)) is not None:
            module.forward = partial(_forward, module)


def _forward(layer: Any, input_TI: Tensor) -> Tensor:
    output: Tensor = _ByCodes.apply(input_TI.to(layer.compute_dtype), layer.weight, layer.bias)
    return output.to(input_TI.dtype)


class _ByCodes(torch.autograd.Function):
    """Computes x W^T + b, where W is in 4 bits, and W and b are frozen.

    From forward to backward it keeps the parameter object, whose data ZeRO-3 frees and gathers
    again. bitsandbytes' MatMul4Bit keeps a view of the gathered codes, so every rank would hold the
    codes of all layers.
    """

    @staticmethod
    def forward(ctx: Any, input_TI: Tensor, codes: Any, bias_O: Tensor | None) -> Tensor:
        from bitsandbytes import matmul_4bit

        ctx.save_for_backward(codes)
        ctx.scales = codes.quant_state
        output_TO: Tensor = matmul_4bit(input_TI, codes, bias=bias_O, quant_state=ctx.scales)
        return output_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TO: Tensor) -> tuple[Tensor, None, None]:
        from bitsandbytes.functional import dequantize_4bit

        (codes,) = ctx.saved_tensors
        weight_OI = dequantize_4bit(codes, ctx.scales).to(gradient_TO.dtype)
        return gradient_TO @ weight_OI, None, None


def dequantise(parameter: nn.Parameter) -> Tensor:
    """Return a quantised parameter's weight as a new tensor in the model's dtype.

    If the parameter is not quantised, return its own tensor.
    """
    scales = _scales(parameter)
    if scales is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(parameter.data, scales)
    return weight


def plain_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the full, dequantised weight, even if ZeRO-3 has divided it."""
    scales = _scales(parameter)
    if scales is not None:
        return tuple(scales.shape)
    return tuple(parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape)


def _scales(parameter: nn.Parameter | None) -> Any:
    return getattr(parameter, "quant_state", None)
