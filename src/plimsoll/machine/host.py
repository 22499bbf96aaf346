"""Memory and cores as this process may use them: the machine's, or less where a cgroup says so; and
how processes and threads share the cores."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import ceil

import psutil

from plimsoll.config.cluster import ClusterConfig
from plimsoll.machine.cgroup import Limit, core_quota, memory_limit


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


def most_at_once(cluster: ClusterConfig, engines: int) -> int:
    """The processes of a node that compute at the same time, at most. Ranks, the critic's own ranks
    and engines take turns: while one kind works the others wait."""
    return ceil(max(cluster.ranks, cluster.critic_ranks or 0, engines) / cluster.nodes)


def waiting() -> dict[str, str]:
    """For the environment of a process, before it imports torch: a thread that waits spins for some
    microseconds only, and then sleeps, unless this process's environment says otherwise. Spinning
    on, it would hold a core that another process, or another thread of its own, could use
    (docs/performance.md).
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return {}
    return {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000")}
