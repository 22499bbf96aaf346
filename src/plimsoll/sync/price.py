"""The price of weights on their way to samplers, computed without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from plimsoll.config.cluster import Device
from plimsoll.config.rollout import DecidedRoute
from plimsoll.timeline.items import Tensors, Where

CHECKSUM_BYTES = 10 * 2**20
"""What a card needs beside a bucket to compute its checksums (sync/buckets.py)."""


@dataclass(frozen=True)
class Sending:
    """The actor's weights on their way to engines.

    Attributes:
        route: How they go; None if an adapter goes alone, as files.
        bucket: Bytes of the largest bucket, or of the adapter.
        two: Bytes of two buckets, or of all weights if that is less.
        gathered: Bytes of the weights that are undivided at once: of a bucket, or of the largest
            tensor from which buckets are cut.
    """

    route: DecidedRoute | None
    bucket: int
    two: int
    gathered: int


def sent_buckets(sending: Sending, device: Device) -> Iterator[Tensors]:
    """Yield the buffers of a rank that sends."""
    source, two = "sync/channel.py", sending.two
    if sending.route is None:
        files = outgoing_buffer("adapter to send", sending.bucket, "trainer/weights.py", "host")
        yield replace(files, life="sending")
    elif sending.route == "host":  # the memory stays for the next sync
        yield replace(outgoing_buffer("buckets of weights", two, source, "host"), life="stepped")
    if device == "cuda" and sending.route is not None:
        size = sending.bucket if sending.route == "host" else two
        name = "packed bucket" if sending.route == "host" else "buckets of weights"
        packed = outgoing_buffer(name, size + CHECKSUM_BYTES, source, "device")
        yield replace(packed, life="sending")


def outgoing_buffer(name: str, size: int, source: str, where: Where) -> Tensors:
    """Return a buffer of so many bytes."""
    return Tensors("buffers", name, "bytes", size, 1, source, where=where)
