"""What a run tells the process that supervises it: a file, whose path is in the environment.

The run touches the file again and again, so that the supervisor sees that it is alive.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import Thread

from plimsoll.run.files import write_whole

VARIABLE = "PLIMSOLL_SUPERVISOR"
"""The environment variable with the path of the file; a process without it is not supervised."""


BEAT_SECONDS = 2.0
"""Seconds between two touches."""


@dataclass(frozen=True)
class OpenRun:
    """A run that has opened its directory.

    Attributes:
        directory: the absolute path of the run directory.
        restarts, notify: see `RunConfig`.
        hang_seconds: how long the process may go without a sign of life; 0: for ever.
    """

    directory: str
    restarts: int
    notify: str | None = None
    hang_seconds: float = 0.0


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
    """Return what the run told; None if it ended before it opened its directory."""
    try:
        return OpenRun(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
