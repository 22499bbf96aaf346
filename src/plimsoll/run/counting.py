"""Counts and sizes in sentences."""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """A count with what it counts, such as `1 row` and `2,048 rows`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def gigabytes(size: int) -> str:
    """Decimal gigabytes, in three digits or all whole ones."""
    digits = 2 if size < 9.995e9 else 1 if size < 99.95e9 else 0
    return f"{size / 1e9:,.{digits}f}"
