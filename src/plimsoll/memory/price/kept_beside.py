"""What a trained role keeps beside weights and states: a moving average, the second copy of the
weights of ZeRO++'s hierarchical partitioning (hpZ), and what is written."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.deepspeed import Device
from plimsoll.config.engine import TrainedRole
from plimsoll.memory.items import Where
from plimsoll.memory.price.division import Counts, ZeroSizes
from plimsoll.memory.price.states import Kept

CHECKPOINT_FILE = 2**28
"""Bytes of states that are put together at once for a checkpoint."""


def kept_beside(
    counts: Counts, sizes: ZeroSizes, device: Device, role: TrainedRole
) -> Iterator[Kept]:
    """The average is in fp32, where the masters are and divided as they are."""
    ranks = sizes.ranks if sizes.stage > 0 else 1
    where: Where = "device" if device == "cuda" and not sizes.offload else "host"
    each = 4 if role.ema is not None else 0
    if each:
        yield Kept(
            "moving average of masters",
            "trained parameters",
            counts.trained,
            each,
            "engine/average.py",
            ranks,
            where,
            "built",
        )
    if role.zero.hpz_partition_size > 1:
        yield _second_copy(counts, role.zero.hpz_partition_size)
    states = round((4 + counts.moments + each) * counts.trained / ranks)
    yield Kept(
        "checkpoint file",
        "bytes: of a file that is gathered, and of the one before",
        min(2 * CHECKPOINT_FILE, states),
        1,
        "engine/checkpoint.py: write_rows",
        where="host",
        life="writing",
    )


def _second_copy(counts: Counts, ranks: int) -> Kept:
    """Of so many ranks together, a share each, from the first forward on: made as weights are
    divided again after their first use (DeepSpeed 0.19.8, runtime/zero/partition_parameters.py,
    _partition_param_sec)."""
    return Kept(
        "second copy of weights",
        "parameters",
        counts.trained + counts.frozen + counts.quantized // 2 // counts.element,
        counts.element,
        "ZeRO++, arXiv 2306.10209, section 3.2",
        ranks,
        life="stepped",
    )
