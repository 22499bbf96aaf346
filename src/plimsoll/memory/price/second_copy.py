"""The second copy of the weights that ZeRO++'s hierarchical partitioning (hpZ) keeps."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.memory.price.division import Counts
from plimsoll.memory.price.states import Kept


def second_copy(counts: Counts, ranks: int) -> Iterator[Kept]:
    """ranks: that keep a copy together, a share each, from the first forward on; 1: there is none.

    It is made as weights are divided again after their first use (DeepSpeed 0.19.8,
    runtime/zero/partition_parameters.py, _partition_param_sec).
    """
    if ranks > 1:
        yield Kept(
            "second copy of weights",
            "parameters",
            counts.trained + counts.frozen + counts.quantized // 2 // counts.element,
            counts.element,
            "ZeRO++, arXiv 2306.10209, section 3.2",
            ranks,
            life="stepped",
        )
