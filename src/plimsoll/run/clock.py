"""Where the time of a step goes: seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

TimedPhase = Literal[
    "data",
    "precompute",
    "load",
    "rollout",
    "score",
    "train_critic",
    "train_actor",
    "sync",
    "eval",
    "save",
]
"""What a step's time is told by. The plan leaves out `data` and `eval`, which hold no more than
others do."""


class PhaseClock:
    """Adds up the seconds of each phase until `reset`. Phases do not nest: each second of a step
    belongs to one phase, so that their sum is never more than the step's time."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._current: TimedPhase | None = None

    @contextmanager
    def phase(self, name: TimedPhase) -> Iterator[None]:
        """Count the time of the block, also of one that ends with an error."""
        assert self._current is None, f"phase {name} inside of {self._current}"
        self._current = name
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed
            self._current = None

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the last reset, in the order in which phases first ran."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Start a new step."""
        self._seconds.clear()
