"""One process at a time in a run directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TextIO

from plimsoll.errors import ConfigError

LOCK_FILE = "run.lock"


def lock_directory(path: Path) -> TextIO:
    """Lock the directory until the file that is returned is closed, or the process ends.

    The system drops the lock of a process that was killed, so a file that is left is no lock.

    Raises ConfigError naming the process that holds the lock, where it has said its number.
    """
    file = (path / LOCK_FILE).open("a+", encoding="ascii")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = _owner(file.read().strip())
        file.close()
        raise ConfigError(
            f"The run directory {path} is in use by {owner}: two runs would overwrite "
            f"each other. Wait for it, stop it, or choose another run.directory. (The command is "
            f"started once, without torchrun or srun: it starts its cluster.ranks itself.)"
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _owner(written: str) -> str:
    """Who holds the lock. A process takes it before it writes its number: in between there is none,
    or that of one that has ended."""
    alive = written.isdecimal() and Path(f"/proc/{written}").exists()
    return f"process {written}" if alive else "another process"
