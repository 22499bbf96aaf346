"""The current phase of a run, for programs that watch it: a small file that each phase rewrites."""

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
    """A phase in progress."""

    step: int
    """Step of the phase; 0 is the evaluation before training and what comes before."""
    steps: int
    """Steps of the whole run; 0 if unknown."""
    phase: str
    since: float = field(default_factory=time.time)
    """Start of the phase, in seconds since 1970."""
    host: str = field(default_factory=socket.gethostname)
    """Machine of the process that runs the loop."""
    pid: int = field(default_factory=os.getpid)
    """Process that runs the loop."""

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have ended; only possible for one on this machine."""
        return self.host == socket.gethostname() and not Path(f"/proc/{self.pid}").exists()


def write_current_phase(path: Path, now: CurrentPhase) -> None:
    """Write the file whole, without waiting for the disk, and ignore a full one."""
    partial = path.with_name(f".{path.name}.partial-{now.pid}")
    with suppress(OSError):
        partial.write_text(json.dumps(asdict(now)), encoding="utf-8")
        partial.replace(path)


def read_current_phase(path: Path) -> CurrentPhase | None:
    """Return the current phase, or None if no run goes on or another version wrote it."""
    try:
        return CurrentPhase(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
