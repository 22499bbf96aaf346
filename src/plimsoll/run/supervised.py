"""What a run tells the process that supervises it: a file, whose path is in the environment.

The run touches the file again and again, so that the supervisor sees that it is alive.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from plimsoll.run.files import write_whole

_HOUR = 3600.0


def recent(times: Sequence[float]) -> int:
    """Return how many of the times are within the hour that ends with the last; seconds."""
    return sum(time > times[-1] - _HOUR for time in times)


def count_of(times: Sequence[float], most: int, what: str) -> str:
    """Return text such as `2 of 3 times in an hour for engines: run.restarts`."""
    return f"{recent(times)} of {most} times in an hour for {what}: run.restarts"


if TYPE_CHECKING:
    from plimsoll.config.cluster import ClusterConfig
    from plimsoll.config.run import RunConfig

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
    """Tell the supervisor of a run, before its directory is open and again when it is."""
    given = cluster.hang_timeout
    hang_seconds = _HANG_SECONDS if given is None else given
    directory = str(Path(run.directory).absolute())
    tell_supervisor(OpenRun(directory, run.restarts, run.notify, hang_seconds, is_open))


def tell_supervisor(run: OpenRun) -> None:
    """Write the file, if this process is supervised, and touch it from then on."""
    path = os.environ.get(VARIABLE)
    if path is not None:
        write_whole(Path(path), json.dumps(asdict(run)))
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
    try:
        return OpenRun(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
