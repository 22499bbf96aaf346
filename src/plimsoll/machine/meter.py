"""What this process holds on its host, and how full the host is."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import psutil

from plimsoll.machine.host import live_host
from plimsoll.run.memory import process_bytes, process_peak_bytes, reset_process_peak
from plimsoll.run.readings import HostReading


def read_host(children: Sequence[int] = ()) -> HostReading:
    """Read this process, and let its peak start again.

    children: ids of processes that count as part of it; one that is gone counts nothing. Pages
    that several of them share (libraries) count in each.
    """
    own = _peak_and_now(None)
    others = [_of_child(pid) for pid in children]
    host = live_host()
    peaks, held = zip(own, *others, strict=True)
    used = host.capacity_bytes - host.free_bytes
    return HostReading(platform.node(), sum(peaks), sum(held), used, host.capacity_bytes)


def _of_child(pid: int) -> tuple[int, int]:
    try:
        return _peak_and_now(pid)
    except (OSError, psutil.Error):
        return 0, 0


def _peak_and_now(pid: int | None) -> tuple[int, int]:
    held = process_bytes(pid)
    peak = process_peak_bytes(pid)
    reset_process_peak(pid)
    return max(peak, held), held
