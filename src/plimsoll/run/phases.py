"""The phases of an optimizer step: the seconds of each, and the file with the current phase.

Each phase rewrites the file. Programs that watch a run read it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from plimsoll.config.json_text import parse_json

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
"""The phases that a step's time is divided into. The plan has no `data` and `eval`, as they hold no
more memory than the other phases."""


class PhaseClock:
    """A clock that adds up the seconds of each phase until `reset`.

    Phases do not nest: every second belongs to one phase, so the sum is at most the step's time.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._current: TimedPhase | None = None

    @contextmanager
    def phase(self, name: TimedPhase) -> Iterator[None]:
        """Add the time of the block to a phase, even if the block raises."""
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
        """Forget all times, at the beginning of a new step."""
        self._seconds.clear()


@dataclass(frozen=True)
class CurrentPhase:
    """A phase in progress."""

    step: int
    """Step of the phase; 0 for the evaluation before training and all phases before it."""
    steps: int
    """Total number of the run's steps; 0 if unknown."""
    phase: str
    since: float = field(default_factory=time.time)
    """Start of the phase, in seconds since 1970."""
    host: str = field(default_factory=socket.gethostname)
    """Machine of the process that runs the loop."""
    pid: int = field(default_factory=os.getpid)
    """Process that runs the loop."""

    @property
    def has_ended(self) -> bool:
        """Whether the run's process has ended; False if it is on another machine."""
        return self.host == socket.gethostname() and not Path(f"/proc/{self.pid}").exists()


def write_current_phase(path: Path, now: CurrentPhase) -> None:
    """Write the file atomically, but without fsync; do nothing if the disk refuses it."""
    partial = path.with_name(f".{path.name}.partial-{now.pid}")
    with suppress(OSError):
        partial.write_text(json.dumps(asdict(now)), encoding="utf-8")
        partial.replace(path)


def read_current_phase(path: Path) -> CurrentPhase | None:
    """Return the phase in the file, or None if there is no file or another version wrote it."""
    try:
        return CurrentPhase(**parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
