"""Held-out rows measured without training, some at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

from plimsoll.cluster.protocol import Cluster
from plimsoll.run.counter import counting

T = TypeVar("T")

_ROWS = 64
"""That a rank is given at once: so many are done between two signs of life."""


def parts_of(rows: Sequence[T], cluster: Cluster) -> Iterator[Sequence[T]]:
    """The rows, some at a time, while a bar shows how far they are."""
    size = _ROWS * cluster.ranks
    with counting("rows", len(rows), sys.stdout) as advance:
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            yield part
            advance(len(part))
