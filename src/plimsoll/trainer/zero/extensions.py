"""DeepSpeed's parts in C++, which a machine compiles at their first use."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plimsoll.errors import PlimsollError
from plimsoll.machine.versions import own_scripts

# On a machine with nvcc and no GPU, torch.utils.cpp_extension logs a warning at import.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

MOST_SECONDS = 600.0
"""The time that compiling may take; it takes about one minute."""

_SHOWN_LINES = 3


def offer_ninja() -> None:
    """Add this Python's script folder to PATH if PATH has no ninja, which torch looks for there.

    If a command is called by its path (.venv/bin/plimsoll), PATH may lack that folder.
    """
    if shutil.which("ninja") is None:
        os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:{own_scripts()}"


@contextmanager
def building(name: str) -> Iterator[None]:
    """Keep other runs from compiling the extension in the block, and remove a killed run's lock.

    Torch makes a lock file while it compiles, and waits for ever for a lock of another process. A
    killed process leaves its lock behind. That lock is removed if a run of Plimsoll made it.

    Raises:
        PlimsollError: Another program's lock is older than compiling takes.
        OSError: The directory cannot be written.
    """
    from torch.utils.cpp_extension import _get_build_directory

    directory = Path(_get_build_directory(name, verbose=False))
    lock, mark = directory / "lock", directory / "plimsoll.building"
    with open(directory / "plimsoll.lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # ended by the kernel when its process is killed
        except OSError:  # some clusters' file systems have no locks
            _await(lock, name)
            yield
            return
        if mark.exists():
            lock.unlink(missing_ok=True)
        mark.touch()
        try:
            _await(lock, name)
            yield
        finally:
            mark.unlink()


def _await(lock: Path, name: str) -> None:
    while (age := _age(lock)) is not None:
        if age > MOST_SECONDS:
            raise PlimsollError(
                f"{lock} has been there for {age / 60:.0f} minutes: a process that compiled "
                f"DeepSpeed's {name} was probably killed, and left it. If no other run on this "
                "machine is starting just now, remove the file and try again"
            )
        time.sleep(1.0)


def compiler_errors(output: str) -> str:
    """Return the first lines of a failed build that say why, without the commands around them."""
    lines = [line.strip() for line in output.splitlines()]
    error_lines = [line for line in lines if "error" in line or "not found" in line]
    return "\n  ".join(error_lines[:_SHOWN_LINES]) or output


def _age(file: Path) -> float | None:
    """Return the seconds since the file was made; None if there is none."""
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return None
