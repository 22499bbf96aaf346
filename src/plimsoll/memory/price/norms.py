"""Copies of gradients in double, of which DeepSpeed takes the norm, one gradient after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plimsoll.config.deepspeed import Device
from plimsoll.memory.price.division import (
    Counts,
    ZeroSizes,
    is_bf16_optimizer,
    is_compact,
    largest_share,
)
from plimsoll.memory.price.states import Kept

_DOUBLE = 8
_AT_ONCE = 250_000_000  # elements: zero/stage3.py, _constant_buffered_norm2
_SOURCE = "DeepSpeed 0.19.8, runtime/zero: get_grad_norm_direct and set_norm_for_param_grad_in_gpu"


def norm_copies(counts: Counts, sizes: ZeroSizes, device: Device) -> Iterator[Kept]:
    """What is made just before the step.

    Nothing at stage 0 and in BF16_Optimizer: there the norm is taken in fp32, of gradients that are
    in it, or before they are widened.
    """
    if not counts.trained or sizes.stage == 0 or is_bf16_optimizer(counts, sizes):
        return
    made = [_copy(counts, sizes), *_brought_back(counts, sizes, device)]
    yield from made if device == "cuda" else [replace(one, where="host") for one in made]


def _copy(counts: Counts, sizes: ZeroSizes) -> Kept:
    piece = largest_share(counts, sizes)
    if sizes.stage == 3 and sizes.offload:
        piece = min(piece, _AT_ONCE)
    return _norming("norm of a gradient", piece, _DOUBLE)


def _brought_back(counts: Counts, sizes: ZeroSizes, device: Device) -> Iterator[Kept]:
    """A gradient that waited in host memory."""
    if not sizes.offload:
        return
    if sizes.stage == 3 and device == "cuda":
        yield _norming("gradient from the host", largest_share(counts, sizes), sizes.accumulate)
    if sizes.stage < 3 and not is_compact(counts, sizes):
        yield _norming("gradient from the host", counts.largest, counts.element)


def _norming(name: str, elements: int, each: int) -> Kept:
    return Kept(name, "of the largest tensor", elements, each, _SOURCE, life="norming")
