"""Copies that training on CPU makes or still has, where GPU kernels and NCCL do without."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.engine import OptimizerConfig
from plimsoll.memory.price.division import Counts, ZeroSizes, is_bf16_optimizer
from plimsoll.memory.price.states import Kept

_FP32 = 4
_WRITTEN_OUT = 5  # both moments, the scaled gradient, a square root and its quotient


def made_on_cpu(counts: Counts, sizes: ZeroSizes, optimizer: OptimizerConfig) -> Iterator[Kept]:
    """While a rank that computes on CPU trains, and while its engine is built."""
    if sizes.stage in (1, 2) and not sizes.offload and not is_bf16_optimizer(counts, sizes):
        yield _first_gradients(counts, sizes)
    if optimizer.kind == "adamw_8bit":
        yield _eight_bit_step(counts, sizes)
    if sizes.stage == 3:
        yield Kept(
            "gloo's copy to reduce",
            "gradients",
            max(min(sizes.bucket, counts.trained), counts.largest),
            counts.element,
            "PyTorch, ProcessGroupGloo.cpp: reduce_scatter_tensor reduces a clone of its input",
            where="host",
            life="reducing",
        )


def _first_gradients(counts: Counts, sizes: ZeroSizes) -> Kept:
    """Beside the flat copy of the weights, free by then, which the heap keeps for a second."""
    return Kept(
        "zeros for gradients",
        "trained parameters",
        counts.trained,
        sizes.master,
        "DeepSpeed 0.19.8, zero/stage_1_and_2.py: initialize_optimizer_states; measured: 3M to "
        "120M parameters, the flat copy still resident",
        sizes.ranks,
        where="host",
        life="building",
    )


def _eight_bit_step(counts: Counts, sizes: ZeroSizes) -> Kept:
    """fp32 copies of one of the optimizer's tensors: at stage 0 a weight, else all of a share, or
    of a sub-group."""
    elements = counts.largest if sizes.stage == 0 else -(-counts.trained // sizes.ranks)
    if sizes.stage == 3:
        elements = min(elements, sizes.sub_group)
    return Kept(
        "copies for 8-bit AdamW",
        "of the largest of the optimizer's tensors",
        elements,
        _WRITTEN_OUT * _FP32,
        "bitsandbytes, backends/cpu/ops.py: _optimizer_update_8bit_blockwise_cpu",
        where="host",
        life="stepping",
    )
