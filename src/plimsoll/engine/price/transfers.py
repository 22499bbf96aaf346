"""Weights on their way in and out, and a teacher's hidden states on their way to its student.

Weights come from files when they are loaded, and leave to engines and to files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from plimsoll.config.cluster import Device
from plimsoll.config.engine import FrozenRole
from plimsoll.shapes.shape import ModelShape
from plimsoll.timeline.items import Allocation, Item, Moment, Where
from plimsoll.timeline.tensors import Tensors

SAVE_BUCKET = 2**30
"""The bytes of weights that are gathered at once to be saved."""
CHECKPOINT_FILE = 2**28
"""The bytes of states that are put together at once for a checkpoint."""

_COMPARED = frozenset({Moment("train_actor", "forward_backward"), Moment("score", "forward")})


def loading_tensors(
    shape: ModelShape, element: int, quantized: int, device: Device
) -> Iterator[Tensors]:
    """Yield what loading holds for a moment.

    The weights are mapped from the checkpoint's files, in page cache that gives way, and cast and
    taken to the device one by one. On CPU, those that are quantised are read ahead.
    """
    if device == "cpu":
        yield Tensors(
            "weights",
            "weights to quantise",
            "read to be quantised",
            quantized,
            element,
            "transformers, core_model_loading.py: threads read ahead",
            where="host",
            life="loading",
        )
    yield Tensors(
        "buffers",
        "copy while loading",
        "of the largest tensor",
        shape.largest_parameter,
        element,
        "engine/zero/placing.py: one weight at a time, from files that are mapped",
        where="host",
        life="loading",
    )


@dataclass(frozen=True)
class Outgoing:
    """The weights of a role, as they leave one rank; bytes.

    Attributes:
        trained: Bytes of the parameters that learn.
        every: Bytes of all parameters, those in 4 bits as they are stored.
        adapted: Whether an adapter learns, and is saved by itself.
        gathers: Whether the engine divides the weights, and gathers them bucket by bucket on every
            rank.
    """

    trained: int
    every: int
    adapted: bool
    gathers: bool


def outgoing_tensors(
    weights: Outgoing, device: Device, sync_bucket: int, first: bool
) -> Iterator[Tensors]:
    """Yield the buffers of the actor's weights on their way to engines and to files.

    Args:
        weights: The weights.
        device: The device that the rank computes on.
        sync_bucket: Bytes of a bucket on the way to engines; of an adapter that is sent alone, its
            bytes.
        first: Whether this is the rank that collects what the ranks gather.
    """
    saved = weights.trained if weights.adapted else weights.every

    def outgoing_buffer(name: str, size: int, source: str, where: Where) -> Tensors:
        return Tensors("buffers", name, "bytes", size, 1, source, where=where)

    if weights.gathers:
        where: Where = "device" if device == "cuda" else "host"
        source = "engine/protocol.py: gathered"
        gathered = outgoing_buffer(
            "gathered weights", min(sync_bucket, weights.every), source, where
        )
        yield replace(gathered, life="sending")
        yield replace(gathered, elements=min(SAVE_BUCKET, saved), life="saving")
    if first:
        bucket = sync_bucket if weights.adapted else min(sync_bucket, weights.every)
        sent = outgoing_buffer(
            "bucket of weights", bucket, "engine/weights.py: make_bucket", "host"
        )
        source = "engine/export.py: write_model collects on rank 0"
        yield replace(sent, life="sending")
        yield replace(outgoing_buffer("model to save", saved, source, "host"), life="saving")


def teacher_items(
    teacher: FrozenRole,
    shape: ModelShape,
    tokens: int,
    moments: frozenset[Moment],
    *,
    has_head: bool,
) -> Iterator[Allocation]:
    """Yield what a teacher leaves for its student on a rank: hidden states, and its head.

    Args:
        teacher: The teacher's config.
        shape: The teacher's shape.
        tokens: Tokens of a step on one rank.
        moments: All moments of the job.
        has_head: Whether the teacher's own weights keep the head whole on the device.
    """
    element, hidden, vocabulary = teacher.model.element, shape.hidden, shape.vocabulary

    def item(name: str, where: Where, size: int, words: str) -> Item:
        formula = f"{element} bytes x {words} x {hidden:,}"
        source = "engine/teacher_forward.py"
        return Item("teacher", "frozen models", name, where, "allocated", size, formula, source)

    words = f"{tokens:,} tokens of a step"
    states = item("hidden states", "host", element * tokens * hidden, words)
    yield Allocation(states, frozenset(moment for moment in moments if moment.phase != "load"))
    if not has_head:
        words = f"{vocabulary:,} of the vocabulary"
        head = item("gathered head", "device", element * vocabulary * hidden, words)
        yield Allocation(head, moments & _COMPARED)
