"""Measure the host memory of processes, write the stacks of those that hang, and end them."""

from __future__ import annotations

import faulthandler
import os
import platform
import resource
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from plimsoll.machine.host import live_host
from plimsoll.run.readings import HostReading

_RESET_PEAK = "5"  # proc(5): resets the process's high-water mark
_helpers: set[int] = set()


def count_as_own(pid: int) -> None:
    """Count a child process as part of this one from now on, as long as it lives."""
    _helpers.add(pid)


def read_host(children: Sequence[int] = ()) -> HostReading:
    """Return the host memory of this process and its helpers (`count_as_own`); reset their peaks.

    `children` are the ids of further processes to include. A process that has ended counts as 0.
    Pages that several processes share (libraries) count in each.
    """
    this_process = _peak_and_now(None)
    others = [_child_peak_and_now(pid) for pid in {*children, *_live_helpers()}]
    host = live_host()
    peaks, held = zip(this_process, *others, strict=True)
    used = host.capacity_bytes - host.free_bytes
    return HostReading(platform.node(), sum(peaks), sum(held), used, host.capacity_bytes)


def _live_helpers() -> set[int]:
    """Return the helpers that still live. An ended helper's id may belong to a new process."""
    return _helpers & {child.pid for child in psutil.Process().children()} if _helpers else set()


def _child_peak_and_now(pid: int) -> tuple[int, int]:
    try:
        return _peak_and_now(pid)
    except (OSError, psutil.Error):
        return 0, 0


def _peak_and_now(pid: int | None) -> tuple[int, int]:
    held = process_bytes(pid)
    peak = process_peak_bytes(pid)
    reset_process_peak(pid)
    return max(peak, held), held


def process_bytes(pid: int | None = None) -> int:
    """Return the resident bytes of a process now; default: this process."""
    return int(psutil.Process(pid).memory_info().rss)


def process_peak_bytes(pid: int | None = None) -> int:
    """Return the most resident bytes of a process since its last reset; default: this process.

    Without /proc nothing can be reset. Then the result for this process is its peak since it
    started, and the result for another process is its size now.
    """
    status = _proc(pid) / "status"
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if pid is not None:
        return process_bytes(pid)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_process_peak(pid: int | None = None) -> bool:
    """Set the peak of a process (default: this one) to its size now; return False if it fails."""
    try:
        (_proc(pid) / "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def child_processes() -> tuple[int, ...]:
    """Return the ids of all processes below this one."""
    return tuple(child.pid for child in psutil.Process().children(recursive=True))


def _proc(pid: int | None) -> Path:
    return Path("/proc") / ("self" if pid is None else str(pid))


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
