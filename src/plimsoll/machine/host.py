"""Memory and cores as this process may use them (the machine's, or less where a cgroup says so),
and what it holds."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import psutil

from plimsoll.machine.cgroup import Limit, core_quota, memory_limit
from plimsoll.run.memory import process_bytes, process_peak_bytes, reset_process_peak
from plimsoll.run.readings import HostReading


@dataclass(frozen=True)
class HostMemory:
    """total_bytes, available_bytes: of the machine. limit: None where no cgroup sets less."""

    total_bytes: int
    available_bytes: int
    limit: Limit | None
    swap_bytes: int
    swap_used_bytes: int

    @property
    def capacity_bytes(self) -> int:
        """What all processes here may fill together."""
        return self.limit.bytes if self.limit else self.total_bytes

    @property
    def free_bytes(self) -> int:
        """What can still be filled."""
        return min(self.available_bytes, self.limit.free_bytes if self.limit else self.total_bytes)


def live_host() -> HostMemory:
    """As it is now."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit = memory_limit()
    if limit is not None and limit.bytes >= memory.total:
        limit = None
    return HostMemory(memory.total, memory.available, limit, swap.total, swap.used)


def usable_cores() -> int:
    """Those that this process may run on; fewer where a cgroup's quota gives less than their time
    (`docker --cpus`, a limit of Kubernetes): more threads would only use it up sooner, and wait."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, ceil(core_quota() or cores))


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
