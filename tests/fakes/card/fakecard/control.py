"""What a test asks of the card, and what it sets. Raises NoCardError in a process without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from fakecard.library import library

Stat = Literal[
    "allocated", "peak_allocated", "reserved", "peak_reserved", "capacity", "allocations",
    "syncs", "pinned", "pinned_allocations", "devices",
]  # fmt: skip
"""Bytes of the card (allocated, reserved, and the highest of both), its capacity, the number of
allocations so far; how often the host waited for the card; pinned bytes, and how often memory was
pinned; how many cards the process sees."""


def stat(name: Stat) -> int:
    """Return a number of this process's card."""
    return int(library().fc_stat(name.encode()))


def take_races() -> list[str]:
    """Return what streams did without waiting for one another since the last call."""
    return str(library().fc_races().decode()).splitlines()


@contextmanager
def catching_races() -> Iterator[list[str]]:
    """Yield a list that holds the block's races after it; they do not fail the test."""
    races: list[str] = []
    file = os.environ.pop("FAKECARD_RACES")
    take_races()
    try:
        yield races
    finally:
        os.environ["FAKECARD_RACES"] = file
        races += take_races()


def set_capacity(size: int) -> None:
    """Set the bytes of this process's card."""
    library().fc_capacity(size)


def fail_at(allocation: int, least: int = 0) -> None:
    """Let one allocation from now on fail.

    Args:
        allocation: how many succeed before it; -1: none fails.
        least: smaller allocations, in bytes, are not counted.
    """
    library().fc_fail_at(allocation, least)


@contextmanager
def refusing_waits() -> Iterator[None]:
    """During the block, raise RuntimeError where the host would wait for the card."""
    library().fc_refuse_sync(1)
    try:
        yield
    finally:
        library().fc_refuse_sync(0)
