"""Hold the processes of a program to limits that no limit of one process can hold together.

A cgroup holds them where this process may make one (machine/new_cgroup.py). In any case they are
looked at some times a second, and the program is ended if they are too much.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Protocol

from plimsoll.machine.new_cgroup import make_cgroup, remove_cgroup

LOOKS_A_SECOND = 50
_OWN_BYTES = 32 * 2**20
"""Memory of the sandbox and its runner, beside that of the program; measured: 16 MB."""
_OWN_PROCESSES = 4
_THREADS, _RESIDENT = 17, 21  # the places in /proc/PID/stat (proc(5)) after the name


@dataclass(frozen=True)
class Sums:
    """The limits of a program's processes together.

    Attributes:
        memory_bytes: Resident memory and files in `/tmp`.
        processes: Processes and threads.
        files: Files in the sandbox's `/tmp`.
    """

    memory_bytes: int
    processes: int = 64
    files: int = 10_000


class Runner(Protocol):
    """A process that runs programs of others."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def has_ended(self) -> bool:
        """Return whether it is gone."""
        ...

    def end(self) -> None:
        """Kill it, and all that it started."""
        ...


def hold(runner: Runner, sums: Sums, has_folder: bool) -> None:
    """Begin to hold a runner and all that it will start to some limits.

    Args:
        runner: The process that will run the program, before it does.
        sums: The limits.
        has_folder: Whether the runner is in a sandbox, with a `/tmp` of its own.
    """
    pids = [runner.pid, *_below(runner.pid)]
    memory_bytes = sums.memory_bytes + _OWN_BYTES
    cgroup = make_cgroup(memory_bytes, sums.processes + _OWN_PROCESSES, pids)
    is_inside = has_folder and len(pids) > 1  # the last one, as bwrap itself is outside
    folder = Path(f"/proc/{pids[-1]}/root/tmp") if is_inside else None

    def watch() -> None:
        """Watch the processes of one program, in a thread.

        The loop consumes what the kernel says of the processes, waits for the next look, is
        unblocked by time alone, and produces the end of the runner if the processes are too much.
        It ends when the runner ends.
        """
        try:
            while not runner.has_ended() and _is_within(runner.pid, folder, sums):
                time.sleep(1 / LOOKS_A_SECOND)
        finally:
            if not runner.has_ended():
                runner.end()
            if cgroup is not None:
                remove_cgroup(cgroup)

    Thread(target=watch, name="watches-program", daemon=True).start()


def can_watch() -> bool:
    """Return whether this kernel lists the children of a process."""
    return Path(f"/proc/self/task/{os.getpid()}/children").exists()


def makes_cgroups() -> bool:
    """Return whether this process may make a cgroup for a program."""
    folder = make_cgroup(2**30, 64)
    if folder is None:
        return False
    remove_cgroup(folder)
    return True


def _is_within(pid: int, folder: Path | None, sums: Sums) -> bool:
    folder_bytes = 0
    with suppress(OSError):  # it has ended
        if folder is not None:
            state = os.statvfs(folder)
            if state.f_files - state.f_ffree > sums.files:
                return False
            folder_bytes = (state.f_blocks - state.f_bfree) * state.f_frsize
    pids = [*_below(pid)]
    threads, pages = map(sum, zip((0, 0), *map(_threads_and_pages, pids), strict=True))
    if threads > sums.processes + _OWN_PROCESSES:
        return False
    most_bytes = sums.memory_bytes + _OWN_BYTES - folder_bytes
    # Pages that forks share count in each of them: the exact sum takes long, so it comes second.
    return pages * os.sysconf("SC_PAGESIZE") <= most_bytes or (
        sum(map(_proportional_bytes, pids)) <= most_bytes
    )


def _below(pid: int) -> Iterator[int]:
    """Yield the processes below a process; parents come before their children."""
    parents = [pid]
    while parents:
        parent = parents.pop()
        with suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{parent}/task"):
                children = map(int, _read(f"/proc/{parent}/task/{task}/children").split())
                for child in children:
                    yield child
                    parents.append(child)


def _threads_and_pages(pid: int) -> tuple[int, int]:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[_THREADS]), int(fields[_RESIDENT])) if fields else (0, 0)


def _proportional_bytes(pid: int) -> int:
    """Return the memory of a process, with its share of what it shares; 0 if it has ended."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return _threads_and_pages(pid)[1] * os.sysconf("SC_PAGESIZE")


def _read(path: str) -> str:
    """Return the text of a file of /proc, or "" if its process has ended."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
