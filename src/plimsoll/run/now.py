"""What a run does now, for who watches it: a small file that each phase writes anew."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class CurrentPhase:
    """A phase that goes on.

    step: that it belongs to; 0: the evaluation before training, and what comes before that. steps:
    of the whole run; 0 where that is not known. since: when the phase began, seconds since 1970.
    host, pid: of the process that runs the loop.
    """

    step: int
    steps: int
    phase: str
    since: float = field(default_factory=time.time)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    @property
    def ended(self) -> bool:
        """Whether its process is known to have gone: only one of this machine can be looked for."""
        return self.host == socket.gethostname() and not Path(f"/proc/{self.pid}").exists()


def write_current_phase(path: Path, now: CurrentPhase) -> None:
    """Whole, but without waiting for the disk: it is of use only while the run goes on. A disk that
    is full is told by what must be written."""
    partial = path.with_name(f".{path.name}.partial-{now.pid}")
    with suppress(OSError):
        partial.write_text(json.dumps(asdict(now)), encoding="utf-8")
        partial.replace(path)


def read_current_phase(path: Path) -> CurrentPhase | None:
    """None where no run goes on, or none that is of this version."""
    try:
        return CurrentPhase(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
