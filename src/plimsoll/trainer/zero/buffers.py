"""DeepSpeed's buffers beside a role's states, and when it reduces gradients for the first time.

The buffers are copies of gradients in fp64, made one at a time for the gradient norm; a second copy
of the weights; and copies that are made only on CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from math import ceil

from plimsoll.config.cluster import Device
from plimsoll.config.engine import OptimizerConfig
from plimsoll.shapes.shape import ModelShape
from plimsoll.timeline.items import Tensors
from plimsoll.trainer.zero.sizes import (
    Counts,
    ZeroSizes,
    is_bf16_optimizer,
    is_compact,
    largest_share,
)

_DOUBLE = 8
_WRITTEN_OUT = 5 * 4  # fp32: both moments, the scaled gradient, a square root and its quotient
_AT_ONCE = 250_000_000  # elements: zero/stage3.py, _constant_buffered_norm2
_SOURCE = "DeepSpeed 0.19.8, runtime/zero: get_grad_norm_direct and set_norm_for_param_grad_in_gpu"


def norm_copies(counts: Counts, sizes: ZeroSizes, device: Device) -> Iterator[Tensors]:
    """Yield the copies of one gradient that are made for the norm, just before the step.

    Yield nothing at stage 0 and for BF16_Optimizer, which take the norm in fp32 without copies.
    """
    if not counts.trained or sizes.stage == 0 or is_bf16_optimizer(counts, sizes):
        return
    piece = largest_share(counts, sizes)
    if sizes.stage == 3 and sizes.offload:
        piece = min(piece, _AT_ONCE)
    copy = _norm_tensors("norm of a gradient", piece, _DOUBLE)
    copies = [copy, *_gradients_from_host(counts, sizes, device)]
    yield from copies if device == "cuda" else (replace(c, where="host") for c in copies)


def _gradients_from_host(counts: Counts, sizes: ZeroSizes, device: Device) -> Iterator[Tensors]:
    """Yield the copy of one offloaded gradient, made when the norm is taken."""
    if not sizes.offload:
        return
    if sizes.stage == 3 and device == "cuda":
        yield _norm_tensors(
            "gradient from the host", largest_share(counts, sizes), sizes.accumulate
        )
    if sizes.stage < 3 and not is_compact(counts, sizes):
        yield _norm_tensors("gradient from the host", counts.largest, counts.element)


def _norm_tensors(name: str, elements: int, each: int) -> Tensors:
    return Tensors(
        "gradients", name, "of the largest tensor", elements, each, _SOURCE, life="norming"
    )


def second_copy(counts: Counts, ranks: int) -> Tensors:
    """Return the second copy of the weights, made by ZeRO++'s hierarchical partitioning (hpZ).

    `ranks`: how many ranks share the copy. It exists from the first forward on, when weights are
    divided again after their first use (DeepSpeed 0.19.8, runtime/zero/partition_parameters.py,
    _partition_param_sec).
    """
    return Tensors(
        "weights",
        "second copy of weights",
        "parameters",
        counts.stored,
        counts.element,
        "ZeRO++, arXiv 2306.10209, section 3.2",
        ranks,
        life="stepped",
    )


def cpu_copies(counts: Counts, sizes: ZeroSizes, optimizer: OptimizerConfig) -> Iterator[Tensors]:
    """Yield copies that a rank makes on CPU only, while it trains and while its engine is built.

    GPU kernels and NCCL do without them.
    """
    if sizes.stage in (1, 2) and not sizes.offload and not is_bf16_optimizer(counts, sizes):
        yield _first_gradients(counts, sizes)
    if optimizer.kind == "adamw_8bit":
        yield _eight_bit_step(counts, sizes)
    if sizes.stage == 3:
        yield Tensors(
            "buffers",
            "gloo's copy to reduce",
            "gradients",
            max(min(sizes.bucket, counts.trained), counts.largest),
            counts.element,
            "PyTorch, ProcessGroupGloo.cpp: reduce_scatter_tensor reduces a clone of its input",
            where="host",
            life="reducing",
        )


def _first_gradients(counts: Counts, sizes: ZeroSizes) -> Tensors:
    """Return the zeros for gradients, made while the engine is built.

    They exist beside the flat copy of the weights: it is free by then, but the heap keeps it for a
    second.
    """
    source = (
        "DeepSpeed 0.19.8, zero/stage_1_and_2.py: initialize_optimizer_states; measured: 3M to "
        "120M parameters, the flat copy still resident"
    )
    return Tensors(
        "gradients",
        "zeros for gradients",
        "trained parameters",
        counts.trained,
        sizes.master,
        source,
        sizes.ranks,
        where="host",
        life="building",
    )


def _eight_bit_step(counts: Counts, sizes: ZeroSizes) -> Tensors:
    """Return the fp32 copies that 8-bit AdamW makes of the optimizer's largest tensor.

    That tensor is a weight at stage 0, a sub-group of the rank's share at stage 3, and the rank's
    share at other stages.
    """
    elements = counts.largest if sizes.stage == 0 else -(-counts.trained // sizes.ranks)
    if sizes.stage == 3:
        elements = min(elements, sizes.sub_group)
    return Tensors(
        "buffers",
        "copies for 8-bit AdamW",
        "of the largest of the optimizer's tensors",
        elements,
        _WRITTEN_OUT,
        "bitsandbytes, backends/cpu/ops.py: _optimizer_update_8bit_blockwise_cpu",
        where="host",
        life="stepping",
    )


BOTH_TABLES = ("embed_tokens", "lm_head")


def layers_left(
    shape: ModelShape, trained: int, sizes: ZeroSizes, whole: Collection[str] = BOTH_TABLES
) -> int:
    """Return how many layers' activations are still kept when DeepSpeed reduces for the first time.

    Gradients arrive from the head down, the embedding's last (a tied head's with it). If a bucket
    holds them all, they are reduced after the last of them, and no layers are left; stage 0 does
    so, too. `trained`: the number of elements of all gradients. `whole`: those of the embedding
    and the head that have gradients.
    """
    if sizes.stage == 0 or sizes.bucket >= trained:
        return 0
    head = shape.head_parameters if "lm_head" in whole else 0
    embedding = "embed_tokens" in whole or (shape.tied and "lm_head" in whole)
    layers = trained - head - (shape.embedding_parameters if embedding else 0)
    undone = min(1.0, max(0, sizes.bucket - head) / max(1, layers))
    return ceil(shape.layers * (1 - undone))
