"""How often a run, or one of its engines, is started again: `run.restarts` times in an hour."""

from __future__ import annotations

from collections.abc import Sequence

_HOUR = 3600.0


def recent(times: Sequence[float]) -> int:
    """Return how many of the times are within the hour that ends with the last; seconds."""
    return sum(time > times[-1] - _HOUR for time in times)


def count_of(times: Sequence[float], most: int, what: str) -> str:
    """Return text such as `2 of 3 times in an hour for engines: run.restarts`."""
    return f"{recent(times)} of {most} times in an hour for {what}: run.restarts"
