"""What this process weighs on the host, now and at its peak."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets the process's high-water mark


@dataclass(frozen=True)
class PeakBytes:
    """The largest resident set of this process.

    source: `VmHWM` is the peak since the last successful `reset_process_peak`; `ru_maxrss` is
        the peak of the whole life of the process, whatever was reset, and is all that there is
        where the system has no /proc.
    """

    bytes: int
    source: Literal["VmHWM", "ru_maxrss"]


def process_bytes() -> int:
    """The resident set of this process now."""
    return int(psutil.Process().memory_info().rss)


def process_peak_bytes() -> PeakBytes:
    """The largest resident set of this process, and since when."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return PeakBytes(int(line.split()[1]) * 1024, "VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return PeakBytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "ru_maxrss")


def reset_process_peak() -> bool:
    """Let the peak start again from the present size.

    False where the system does not allow it: then the peak stays that of the process's life.
    """
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True
