"""What the pool (processes.py) and its processes (worker.py) tell each other: pickles, each with
its length before it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.config.base import OptionValue

LENGTH = struct.Struct(">Q")


@dataclass(frozen=True)
class Setup:
    """The first message: which function to call, and how.
    memory_bytes: what it may take beyond what it has once the function is loaded."""

    name: str
    options: Mapping[str, OptionValue]
    batch: bool
    memory_bytes: int | None


def framed(message: bytes) -> bytes:
    """A message with its length before it."""
    return LENGTH.pack(len(message)) + message
