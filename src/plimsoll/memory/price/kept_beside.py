"""What a trained role keeps beside weights and states: a moving average, and what is written."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.deepspeed import Device
from plimsoll.memory.items import Where
from plimsoll.memory.price.division import Counts, ZeroSizes
from plimsoll.memory.price.states import Kept

CHECKPOINT_FILE = 2**28
"""Bytes of states that are put together at once for a checkpoint."""


def kept_beside(counts: Counts, sizes: ZeroSizes, device: Device, average: bool) -> Iterator[Kept]:
    """average: a moving average is kept, in fp32, where the masters are and divided as they are."""
    ranks = sizes.ranks if sizes.stage > 0 else 1
    where: Where = "device" if device == "cuda" and not sizes.offload else "host"
    each = 4 if average else 0
    if average:
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
