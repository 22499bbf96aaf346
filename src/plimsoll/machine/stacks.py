"""Handle processes that hang: write their threads' stacks, find stopped ones, end them."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_SIGNAL = signal.SIGUSR1


def write_stacks_when_asked() -> None:
    """Make this process write its threads' stacks to stderr when `ask_for_stacks` asks.

    This works even if a thread holds Python's lock.
    """
    faulthandler.register(_SIGNAL, all_threads=True)


def ask_for_stacks(pids: Sequence[int]) -> list[str]:
    """Make processes of this machine, and their child processes, write their threads' stacks.

    Return the processes that cannot, because they are stopped: "4711 (ray::RankActor)".
    """
    stopped = []
    for process in families(pids):
        with suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_STOPPED:
                stopped.append(f"{process.pid} ({' '.join(process.cmdline())[:40].strip()})")
            elif _catches(process.pid):  # the signal would end any other process
                process.send_signal(_SIGNAL)
    return stopped


def end_processes(pids: Sequence[int]) -> None:
    """Kill processes of this machine and their child processes, stopped ones included.

    Python's trackers of resources live on: once the others are gone they remove the shared memory
    and the semaphores that those have left, and end.
    """
    for process in families(pids):
        with suppress(psutil.Error):
            if not tracks_resources(process):
                process.kill()


def tracks_resources(process: psutil.Process) -> bool:
    """Return whether a process is Python's tracker of another's shared memory and semaphores."""
    with suppress(psutil.Error):
        return any("resource_tracker" in word for word in process.cmdline())
    return False


def families(pids: Collection[int]) -> Iterator[psutil.Process]:
    """Yield the processes with these ids and all their descendants, without ended processes."""
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            yield from (process, *process.children(recursive=True))


def _catches(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line for line in lines if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (_SIGNAL - 1) & 1) and pid != os.getpid()
