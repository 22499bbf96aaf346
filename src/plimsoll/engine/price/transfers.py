"""Weights on their way in, from files when they are loaded, and out, to engines and to files; and a
teacher's hidden states, on their way to its student.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plimsoll.config.cluster import Device
from plimsoll.config.engine import FrozenRole
from plimsoll.engine.zero.sizes import Counts, ZeroSizes
from plimsoll.shapes.shape import ModelShape
from plimsoll.timeline.items import Allocation, Item, Moment, Where
from plimsoll.timeline.tensors import Tensors

SAVE_BUCKET = 2**30
"""Bytes of weights that are gathered at once to be saved."""
CHECKPOINT_FILE = 2**28
"""Bytes of states that are put together at once for a checkpoint."""

_COMPARED = frozenset({Moment("train_actor", "forward_backward"), Moment("score", "forward")})


def loading(shape: ModelShape, counts: Counts, device: Device) -> Iterator[Tensors]:
    """The weights are mapped from the checkpoint's files, in page cache that gives way, and cast
    and taken to the device one by one. On CPU, those that are quantised are read ahead."""
    if device == "cpu":
        yield Tensors(
            "weights",
            "weights to quantise",
            "read to be quantised",
            counts.quantized,
            counts.element,
            "transformers, core_model_loading.py: threads read ahead",
            where="host",
            life="loading",
        )
    yield Tensors(
        "buffers",
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
    first: bool,
) -> Iterator[Tensors]:
    """The actor's weights on their way to engines and to files, gathered bucket by bucket on every
    rank, and collected on the first.

    adapted: an adapter is saved by itself; how it is sent, merged or alone, is in sync_bucket.
    """
    own = counts.trained * counts.element
    every = own + counts.frozen * counts.element + counts.quantized // 2
    saved = own if adapted else every

    def passing(name: str, size: int, source: str, where: Where) -> Tensors:
        return Tensors("buffers", name, "bytes", size, 1, source, where=where)

    if sizes.stage == 3 and sizes.ranks > 1:
        where: Where = "device" if device == "cuda" else "host"
        source = "engine/placing.py: gathered"
        gathered = passing("gathered weights", min(sync_bucket, every), source, where)
        yield replace(gathered, life="sending")
        yield replace(gathered, elements=min(SAVE_BUCKET, saved), life="saving")
    if first:
        bucket = sync_bucket if adapted else min(sync_bucket, every)
        sent = passing("bucket of weights", bucket, "engine/weights.py: make_bucket", "host")
        source = "engine/export.py: write_model collects on rank 0"
        yield replace(sent, life="sending")
        yield replace(passing("model to save", saved, source, "host"), life="saving")


def teacher_items(
    teacher: FrozenRole,
    shape: ModelShape,
    tokens: int,
    ranks: int,
    device: Device,
    moments: frozenset[Moment],
) -> Iterator[Allocation]:
    """What a teacher leaves for its student on a rank: hidden states, and its head where that is
    not there already. tokens: of a step, on one rank. moments: all of the job's."""
    element, hidden, vocabulary = teacher.model.element, shape.hidden, shape.vocabulary

    def item(name: str, where: Where, size: int, words: str) -> Item:
        formula = f"{element} bytes x {words} x {hidden:,}"
        source = "engine/teacher_forward.py"
        return Item("teacher", "frozen models", name, where, "allocated", size, formula, source)

    words = f"{tokens:,} tokens of a step"
    states = item("hidden states", "host", element * tokens * hidden, words)
    yield Allocation(states, frozenset(moment for moment in moments if moment.phase != "load"))
    divided = teacher.stage == 3 and ranks > 1
    if divided or (teacher.offload == "cpu" and device == "cuda"):
        words = f"{vocabulary:,} of the vocabulary"
        head = item("gathered head", "device", element * vocabulary * hidden, words)
        yield Allocation(head, moments & _COMPARED)
