"""What a run tells the process that supervises it: a file, whose path is in the environment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from plimsoll.run.files import write_whole

VARIABLE = "PLIMSOLL_SUPERVISOR"
"""The environment variable with the path of the file; a process without it is not supervised."""


@dataclass(frozen=True)
class OpenRun:
    """A run that has opened its directory.

    Attributes:
        directory: the absolute path of the run directory.
        restarts, notify: see `RunConfig`.
    """

    directory: str
    restarts: int
    notify: str | None = None


def tell_supervisor(run: OpenRun) -> None:
    """Write the file, if this process is supervised."""
    path = os.environ.get(VARIABLE)
    if path is not None:
        write_whole(Path(path), json.dumps(asdict(run)))


def read_open_run(path: Path) -> OpenRun | None:
    """Return what the run told; None if it ended before it opened its directory."""
    try:
        return OpenRun(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
