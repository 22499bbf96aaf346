"""Counts in sentences."""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """A count with what it counts, such as `1 row` and `2,048 rows`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
