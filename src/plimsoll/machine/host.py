"""Read memory, cores and CPU instructions of this process, and decide how processes share cores.

A cgroup may allow less than the machine has. The instructions decide in which dtype a CPU computes
fast.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path

import psutil

from plimsoll.config.cluster import ClusterConfig, NodeGroup
from plimsoll.machine.cgroup import core_quota, memory_limit

_BFLOAT16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16", "svebf16"}
"""Flags in /proc/cpuinfo of instructions that multiply bfloat16: two on x86, two on ARM."""

_LIMIT = "ONEDNN_MAX_CPU_ISA"
"""The variable that keeps oneDNN, which computes matrix products, from newer instructions."""

_LIMITS_WITH_BFLOAT16 = {"ALL", "DEFAULT", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"}
"""Values of that variable that allow the instructions of `_BFLOAT16_FLAGS`. All values that contain
AMX allow them, too (oneDNN's documentation, "CPU Dispatcher Control").
"""


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for matrix products in bfloat16.

    Without them a product in bfloat16 takes six to twelve times as long as one in float32
    (docs/performance.md). False also if `ONEDNN_MAX_CPU_ISA` excludes the instructions.
    """
    limit = os.environ.get(_LIMIT, "ALL").upper()
    allowed = limit in _LIMITS_WITH_BFLOAT16 or "AMX" in limit
    return allowed and bool(_BFLOAT16_FLAGS & cpu_flags())


@cache
def cpu_flags() -> frozenset[str]:
    """Return the flags of the first CPU in /proc/cpuinfo; none if there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    entries = (line.partition(":") for line in lines)
    flags = next((text for key, _, text in entries if key.strip() in ("flags", "Features")), "")
    return frozenset(flags.split())


@dataclass(frozen=True)
class HostMemory:
    """The memory of the host."""

    total_bytes: int
    """All memory of the machine."""
    capacity_bytes: int
    """The bytes that all processes here may hold together: fewer than all if cgroups say so."""
    free_bytes: int
    """The bytes that are still available: free, or can be freed."""


def live_host() -> HostMemory:
    """Return the host's memory as it is now."""
    memory = psutil.virtual_memory()
    limit, free = memory_limit() or (memory.total, memory.total)
    if limit >= memory.total:
        return HostMemory(memory.total, memory.total, memory.available)
    return HostMemory(memory.total, limit, min(memory.available, free))


def usable_cores() -> int:
    """Return how many cores this process may use.

    A cgroup's quota (`docker --cpus`, a limit of Kubernetes) may allow less time than the cores
    have. More threads would only use the quota up sooner, and wait.
    """
    cores = len(os.sched_getaffinity(0))
    return min(cores, ceil(core_quota() or cores))


def most_busy_processes(cluster: ClusterConfig, engines: int) -> int:
    """Return the largest number of processes on a node that compute at the same time.

    The groups of ranks and the engines take turns: while one kind works, the others wait.
    """
    counts: list[tuple[NodeGroup, int]]
    counts = [*cluster.rank_counts.items(), ("engines", engines)]
    return max(ceil(count / len(cluster.nodes_of(name))) for name, count in counts)


def own_address(address: str) -> str:
    """Return the address of this machine from which the system sends to another address.

    For an address of this machine that is the address itself, unless a router translates it.
    """
    family, kind, _, _, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # a socket of datagrams: nothing is sent
        own: str = probe.getsockname()[0]
        return own


def network_interface(node: str) -> dict[str, str]:
    """Return the variables that have gloo and NCCL use the interface of a node's address.

    Otherwise gloo takes the address of the machine's host name: often 127.0.1.1, or none. NCCL
    takes the first interface of its list but loopback: one that other nodes may not reach, or that
    others can reach though all processes are here. The result is empty if no interface has the
    address.
    """
    own = own_address(node)
    addresses = ((name, a) for name, entries in psutil.net_if_addrs().items() for a in entries)
    interface = next((name for name, a in addresses if a.address == own), None)
    if interface is None:
        return {}
    # without "=", NCCL takes any interface whose name begins so
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def thread_wait_settings() -> dict[str, str]:
    """Return the environment variable that makes waiting threads sleep soon.

    Set it before torch is imported. A waiting thread that spins keeps a core from other threads
    (docs/performance.md). The result is empty if the environment already has OMP_WAIT_POLICY.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return {}
    return {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000")}
