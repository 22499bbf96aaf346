"""One process at a time in a run directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.errors import ConfigError

if TYPE_CHECKING:
    from filelock import FileLock

LOCK_FILE = "run.lock"


def lock_directory(path: Path) -> FileLock:
    """Lock the directory until what is returned is released, or the process ends.

    The system drops the lock of a process that was killed, so a file that is left is no lock.

    Raises ConfigError naming the process that holds the lock, where it has said its number.
    """
    from filelock import FileLock, Timeout  # not for a plan

    file = path / LOCK_FILE
    # Where a disk has no such locks, one that outlives its process would be no help.
    lock = FileLock(file, blocking=False, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        owner = _owner(file.read_text(encoding="ascii").strip())
        raise ConfigError(
            f"The run directory {path} is in use by {owner}: two runs would overwrite "
            f"each other. Wait for it, stop it, or choose another run.directory. (The command is "
            f"started once, without torchrun or srun: it starts its cluster.ranks itself.)"
        ) from error
    file.write_text(f"{os.getpid()}\n", encoding="ascii")
    return lock


def _owner(written: str) -> str:
    """Who holds the lock. A process takes it before it writes its number: in between there is none,
    or that of one that has ended."""
    alive = written.isdecimal() and Path(f"/proc/{written}").exists()
    return f"process {written}" if alive else "another process"
