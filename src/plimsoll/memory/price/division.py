"""What a role's weights and states are divided by: its parameters in numbers, and ZeRO's sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ZeroSizes:
    """The settings of a role's engine that memory depends on, elements where not said otherwise.

    offload, offload_weights: of the optimizer, and of the weights (stage 3), to pinned or plain
    host memory. accumulate: bytes of an accumulated gradient. master: of a master, and of the
    gradient that its optimizer reads.
    """

    stage: int
    ranks: int
    accumulate: int
    bucket: int
    prefetch: int = 0
    live: int = 0
    persistence: int = 0
    sub_group: int = 0
    offload: bool = False
    offload_weights: bool = False
    pinned: bool = False
    master: int = 4


@dataclass(frozen=True)
class Counts:
    """Elements of one role's parameters, and their bytes.

    trained, frozen: with and without gradients; not what is in 4 bits. quantized: in 4 bits.
    scales: bytes of quantisation scales per such parameter. small: in tensors below the
    persistence threshold. largest: of the largest trained tensor. oversized: in trained tensors
    larger than a bucket. element: bytes of a weight. moments: bytes of both Adam moments.
    """

    trained: int
    frozen: int
    largest: int
    element: int
    moments: float = 8.0
    quantized: int = 0
    scales: float = 0.0
    small: int = 0
    oversized: int = 0


def is_bf16_optimizer(counts: Counts, sizes: ZeroSizes) -> bool:
    """Whether DeepSpeed takes that one (runtime/engine.py, _do_optimizer_sanity_check)."""
    wide = counts.element == 2 and sizes.accumulate == 4
    return sizes.stage == 1 and wide and not sizes.offload


def is_compact(counts: Counts, sizes: ZeroSizes) -> bool:
    """Whether a rank's gradients are added up in fp32 (_use_compact_grad_partition_buffer)."""
    return counts.element == 2 and sizes.accumulate == 4


def largest_share(counts: Counts, sizes: ZeroSizes) -> int:
    """Elements that a rank gets of the largest gradient: all gradients are divided together, so
    that it may get one whole; at stage 3 each is."""
    divided = counts.largest if sizes.stage == 3 else counts.trained
    return min(counts.largest, -(-divided // sizes.ranks))
