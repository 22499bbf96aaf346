"""The seconds of a step, by phase."""

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
"""The phases that a step's time is divided into. The plan has no `data` and `eval`: they hold no
more than the other phases."""


class PhaseClock:
    """A clock that adds up the seconds of each phase until `reset`.

    Phases do not nest: every second belongs to one phase, so the sum is at most the step's time.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._current: TimedPhase | None = None

    @contextmanager
    def phase(self, name: TimedPhase) -> Iterator[None]:
        """Count the time of the block, even if it ends with an error."""
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
        """Return the seconds of each phase since the last reset, in order of their first run."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Begin a new step."""
        self._seconds.clear()
