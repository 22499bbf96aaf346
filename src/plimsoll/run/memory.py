"""What a process weighs on the host, now and at its peak."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

_RESET_PEAK = "5"  # proc(5): resets the process's high-water mark


@dataclass(frozen=True)
class PeakBytes:
    """The largest resident set of a process.

    source: `VmHWM` is the peak since the last successful `reset_process_peak`; `ru_maxrss` is
        the peak of the whole life of this process, whatever was reset, and is all that there is
        where the system has no /proc; `now` is then all that is known of another process.
    """

    bytes: int
    source: Literal["VmHWM", "ru_maxrss", "now"]


def process_bytes(pid: int | None = None) -> int:
    """The resident set of a process now; default: of this one."""
    return int(psutil.Process(pid).memory_info().rss)


def process_peak_bytes(pid: int | None = None) -> PeakBytes:
    """The largest resident set of a process (default: this one), and since when."""
    status = _proc(pid) / "status"
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return PeakBytes(int(line.split()[1]) * 1024, "VmHWM")
    if pid is not None:
        return PeakBytes(process_bytes(pid), "now")
    unit = 1 if sys.platform == "darwin" else 1024
    return PeakBytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "ru_maxrss")


def reset_process_peak(pid: int | None = None) -> bool:
    """Let the peak of a process (default: this one) start again from its present size.

    False where the system does not allow it: then the peak stays that of the process's life.
    """
    try:
        (_proc(pid) / "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def child_processes() -> tuple[int, ...]:
    """The ids of all processes below this one."""
    return tuple(child.pid for child in psutil.Process().children(recursive=True))


def _proc(pid: int | None) -> Path:
    return Path("/proc") / ("self" if pid is None else str(pid))
