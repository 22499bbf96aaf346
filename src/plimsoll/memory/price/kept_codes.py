"""4-bit weights that ZeRO-3 divides, and that every rank holds whole until its backward."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.memory.price.states import Kept
from plimsoll.memory.price.zero_states import Counts, ZeroSizes


def kept_codes(counts: Counts, sizes: ZeroSizes) -> Iterator[Kept]:
    """Beside what may be live: the matrix product of bitsandbytes keeps the gathered codes of each
    layer from the forward to the backward, out of sight of DeepSpeed, which believes that it let
    them go, and of gradient checkpointing (bitsandbytes, autograd/_functions.py: MatMul4Bit's
    ctx.tensors)."""
    gathers = sizes.ranks > 1 or sizes.offload_weights
    if sizes.stage < 3 or not gathers or not counts.trained:
        return
    codes = counts.quantized // 2 // counts.element
    yield Kept(
        "4-bit weights until the backward",
        "gathered, beside live parameters",
        max(0, codes - max(sizes.live, counts.largest)),
        counts.element,
        "bitsandbytes 0.50, autograd/_functions.py: MatMul4Bit",
        life="learning",
    )
