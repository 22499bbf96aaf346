"""`torch.cuda`'s devices, streams and events, on those that the library has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch

from fakecard.library import library

_CUDA = 1
"""The number of CUDA among PyTorch's device types."""


def index_of(device: Any = None) -> int:
    """Return the number of a device as torch.cuda takes it: None and -1 are the present one."""
    if device is None or (isinstance(device, int) and device < 0):
        return int(library().fc_get_device())
    if isinstance(device, int):
        return device
    named = torch.device(device)
    if named.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {named}")
    return index_of(named.index)


class Stream(torch.Stream):
    """`torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Self:
        """Make a stream, or stand for one that is known by its number."""
        if known:
            return super().__new__(cls, **known)
        return super().__new__(
            cls, device=torch.device("cuda", index_of(device)), priority=priority
        )

    @property
    def cuda_stream(self) -> int:
        """The number by which other libraries know the stream."""
        return self.stream_id


class Event(torch.Event):
    """`torch.cuda.Event`."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Self:
        """Make an event of the card."""
        return super().__new__(
            cls, "cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


def stream_of(number: int, device: Any = None) -> Stream:
    """Return the stream with a number."""
    return Stream(stream_id=number, device_index=index_of(device), device_type=_CUDA)


def current_stream(device: Any = None) -> Stream:
    """Return this thread's stream."""
    return stream_of(library().fc_get_stream(), device)


def default_stream(device: Any = None) -> Stream:
    """Return the stream that every thread begins with."""
    return stream_of(0, device)


def set_stream(stream: Stream) -> None:
    """Give this thread another stream."""
    library().fc_set_stream(stream.stream_id)


@contextmanager
def on_stream(number: int) -> Iterator[None]:
    """Give this thread another stream during the block."""
    before = library().fc_get_stream()
    library().fc_set_stream(number)
    try:
        yield
    finally:
        library().fc_set_stream(before)


class StreamContext:
    """`torch.cuda.StreamContext`, and `torch.cuda.stream`."""

    def __init__(self, stream: Stream | None) -> None:
        number = library().fc_get_stream() if stream is None else stream.stream_id
        self._context: AbstractContextManager[None] = on_stream(number)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


class Device:
    """`torch.cuda.device`: the present device during a block."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = index_of()
        if self.idx >= 0:
            library().fc_set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        library().fc_set_device(self.prev_idx)
