"""Messages between a process and its child: the number of bytes, then the bytes.

Imports the standard library alone, as do serve.py and program_runner.py: they run in the sandbox.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

_LENGTH = struct.Struct(">Q")
_LARGEST_BYTES = 2**30


class Codec(NamedTuple):  # dataclasses would take a tenth of the start of a sandbox
    """How values become bytes and values again."""

    dumps: Callable[[Any], bytes]
    loads: Callable[[bytes], Any]


JSON = Codec(lambda value: json.dumps(value).encode(), json.loads)
"""For every child; the only codec for one that runs what a policy wrote (see pickled.py)."""


def frame(message: bytes) -> bytes:
    """Return a message with its length before it."""
    return _LENGTH.pack(len(message)) + message


def read_frame(read: Callable[[int], bytes]) -> bytes:
    """Return the next message. `read` returns as many bytes as asked, fewer only at the end.

    Raises EOFError if the stream ends first, or if what it says is no length of a message.
    """
    (size,) = _LENGTH.unpack(_read_exactly(read, _LENGTH.size))
    if size > _LARGEST_BYTES:
        raise EOFError(f"a message of {size} bytes is too long")
    return _read_exactly(read, size)


def _read_exactly(read: Callable[[int], bytes], size: int) -> bytes:
    data = read(size)
    if len(data) < size:
        raise EOFError("the stream ended within a message")
    return data
