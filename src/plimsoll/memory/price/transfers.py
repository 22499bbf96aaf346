"""Weights on their way in, from files when they are loaded, and out, to engines and to files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plimsoll.config.deepspeed import Device
from plimsoll.memory.items import Where
from plimsoll.memory.price.division import Counts, ZeroSizes
from plimsoll.memory.price.states import Kept
from plimsoll.shapes.shape import ModelShape

SAVE_BUCKET = 2**30
"""Bytes of weights that are gathered at once to be saved."""


def loading(shape: ModelShape, counts: Counts, device: Device) -> Iterator[Kept]:
    """The weights are mapped from the checkpoint's files, in page cache that gives way, and cast
    and taken to the device one by one. On CPU, those that are quantised are read ahead."""
    if device == "cpu":
        yield Kept(
            "weights to quantise",
            "read to be quantised",
            counts.quantized,
            counts.element,
            "transformers, core_model_loading.py: threads read ahead",
            where="host",
            life="loading",
        )
    yield Kept(
        "copy while loading",
        "of the largest tensor",
        shape.largest_parameter,
        counts.element,
        "engine/placing.py: one weight at a time, from files that are mapped",
        where="host",
        life="loading",
    )


def leaving(
    counts: Counts,
    sizes: ZeroSizes,
    adapted: bool,
    device: Device,
    sync_bucket: int,
) -> Iterator[Kept]:
    """Weights on their way to engines and to files, gathered bucket by bucket on every rank.

    adapted: an adapter is saved by itself; how it is sent, merged or alone, is in sync_bucket.
    """
    own = counts.trained * counts.element
    every = own + counts.frozen * counts.element + counts.quantized // 2
    saved = own if adapted else every
    where: Where = "device" if device == "cuda" else "host"
    if sizes.stage == 3 and sizes.ranks > 1:
        gathered = Kept(
            "gathered weights", "bytes", 0, 1, "engine/placing.py: gathered", where=where
        )
        yield replace(gathered, elements=min(sync_bucket, every), life="sending")
        yield replace(gathered, elements=min(SAVE_BUCKET, saved), life="saving")
    bucket = sync_bucket if adapted else min(sync_bucket, every)
    source = "engine/weights.py: make_bucket"
    yield Kept("bucket of weights", "bytes", bucket, 1, source, where="host", life="sending")
    source = "engine/export.py: write_model collects on rank 0"
    yield Kept("model to save", "bytes", saved, 1, source, where="host", life="saving")
