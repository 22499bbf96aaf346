"""Copies of gradients in double, of which DeepSpeed takes the norm, one gradient after another.

On CPU they leave holes. glibc before 2.39 keeps apart what it cuts off a block to align it (its bug
30723), so a freed copy has no room for the next one of its size, and the norms, which last, lie
between them: copies of one size end up side by side. Smaller ones find room where those were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from plimsoll.config.deepspeed import Device
from plimsoll.memory.price.heap import small_bytes
from plimsoll.memory.price.states import Kept
from plimsoll.memory.price.zero_states import Counts, ZeroSizes, is_bf16_optimizer, is_compact
from plimsoll.memory.shapes.shape import Tensors

_DOUBLE = 8
_AT_ONCE = 250_000_000  # elements: zero/stage3.py, _constant_buffered_norm2
_SOURCE = "DeepSpeed 0.19.8, runtime/zero: get_grad_norm_direct and set_norm_for_param_grad_in_gpu"


def norm_copies(
    counts: Counts, sizes: ZeroSizes, tensors: Sequence[Tensors], device: Device
) -> Iterator[Kept]:
    """What is made just before the step; tensors: the trained ones.

    Nothing at stage 0 and in BF16_Optimizer: there the norm is taken in fp32, of gradients that are
    in it, or before they are widened.
    """
    if not counts.trained or sizes.stage == 0 or is_bf16_optimizer(counts, sizes):
        return
    made = [_copy(counts, sizes), *_brought_back(counts, sizes, device)]
    if device == "cuda":
        yield from made
        return
    yield from (replace(one, where="host") for one in (*made, _holes(tensors, sizes)))


def _copy(counts: Counts, sizes: ZeroSizes) -> Kept:
    piece = _piece(counts.largest, sizes)
    if sizes.stage < 3:
        piece = min(piece, -(-counts.trained // sizes.ranks))
    elif sizes.offload:
        piece = min(piece, _AT_ONCE)
    return _norming("norm of a gradient", piece, _DOUBLE)


def _piece(elements: int, sizes: ZeroSizes) -> int:
    """Of a tensor's gradient on one rank: stage 3 divides every tensor, the others all of them."""
    return -(-elements // sizes.ranks) if sizes.stage == 3 else elements


def _brought_back(counts: Counts, sizes: ZeroSizes, device: Device) -> Iterator[Kept]:
    """A gradient that waited in host memory."""
    if not sizes.offload:
        return
    if sizes.stage == 3 and device == "cuda":
        piece = _piece(counts.largest, sizes)
        yield _norming("gradient from the host", piece, sizes.accumulate)
    if sizes.stage < 3 and not is_compact(counts, sizes):
        yield _norming("gradient from the host", counts.largest, counts.element)


def _holes(tensors: Sequence[Tensors], sizes: ZeroSizes) -> Kept:
    """Of the size of tensor that takes most of them."""
    together: Counter[int] = Counter()
    for one in tensors:
        piece = _piece(one.elements, sizes)
        if small_bytes(_DOUBLE, _DOUBLE * piece):
            together[piece] += one.parameters
    [(piece, elements)] = together.most_common(1) or [(0, 0)]
    of = f"of the {elements // max(1, piece):,} gradients of {piece:,} elements"
    holes = _norming("holes left by norms", elements, _DOUBLE)
    source = "glibc, bug 30723"
    return replace(holes, of=of, ranks=sizes.ranks, block=piece, source=source, level="process")


def _norming(name: str, elements: int, each: int) -> Kept:
    return Kept(name, "of the largest tensor", elements, each, _SOURCE, life="norming")
