"""The phases of an optimizer step, and what a run tells the programs that watch it.

The seconds of each phase are added up. Each phase rewrites a file with the current phase.

A run tells the process that supervises it that it lives: it touches a file again and again, whose
path is in the environment.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Literal

from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.run import RunConfig
from plimsoll.run.files import read_record, write_whole

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
    return read_record(path, CurrentPhase)


_HOUR = 3600.0


def recent(times: Sequence[float]) -> int:
    """Return how many of the times are within the hour that ends with the last; seconds."""
    return sum(time > times[-1] - _HOUR for time in times)


def count_of(times: Sequence[float], most: int, what: str) -> str:
    """Return text such as `2 of 3 times in an hour for engines: run.restarts`."""
    return f"{recent(times)} of {most} times in an hour for {what}: run.restarts"


VARIABLE = "PLIMSOLL_SUPERVISOR"
"""The environment variable with the path of the file; a process without it is not supervised."""


BEAT_SECONDS = 2.0
"""Seconds between two touches."""
_HANG_SECONDS = 300.0
"""How long the process may go without a sign of life if `cluster.hang_timeout` is not set: longer
than any library holds Python's lock."""


@dataclass(frozen=True)
class OpenRun:
    """A run whose settings are read.

    Attributes:
        directory: the absolute path of the run directory.
        restarts, notify: see `RunConfig`.
        hang_seconds: how long the process may go without a sign of life; 0: for ever.
        is_open: whether the run has opened its directory.
    """

    directory: str
    restarts: int
    notify: str | None = None
    hang_seconds: float = 0.0
    is_open: bool = True


def tell_of_run(run: RunConfig, cluster: ClusterConfig, *, is_open: bool) -> None:
    """Tell the supervisor, if there is one, of a run before its directory is open, and when it is.

    The file is touched from then on.
    """
    path, given = os.environ.get(VARIABLE), cluster.hang_timeout
    if path is not None:
        hang_seconds = _HANG_SECONDS if given is None else given
        directory = str(Path(run.directory).absolute())
        told = OpenRun(directory, run.restarts, run.notify, hang_seconds, is_open)
        write_whole(Path(path), json.dumps(asdict(told)))
        _keep_touching(path)


@cache
def _keep_touching(path: str) -> None:
    Thread(target=_touch, args=(path,), name="beat", daemon=True).start()


def _touch(path: str) -> None:
    """Touch a file until it is removed, or this process ends or hangs."""
    with suppress(OSError):
        while True:
            os.utime(path)
            time.sleep(BEAT_SECONDS)


def read_open_run(path: Path) -> OpenRun | None:
    """Return what the run told; None if it ended before its settings were read."""
    return read_record(path, OpenRun)
