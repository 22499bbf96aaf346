"""Host memory as this process may use it: the machine's, or less where a cgroup says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Limit:
    """What cgroups allow: bytes in all, and what is still free of it (file caches count as free,
    for the kernel gives them back)."""

    bytes: int
    free_bytes: int


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
    limit = cgroup_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    if limit is not None and limit.bytes >= memory.total:
        limit = None
    return HostMemory(memory.total, memory.available, limit, swap.total, swap.used)


def cgroup_limit(membership: Path, root: Path) -> Limit | None:
    """What this process's cgroup and those above it leave to it; None without any limit.

    membership: /proc/self/cgroup. root: /sys/fs/cgroup. Version 2 has memory.max with `max` for
    none, version 1 memory.limit_in_bytes below the controller's own directory with a number near
    2**63 for none. A container often sees its own cgroup as the root.
    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    found = [limit for folder in _folders(membership, root) if (limit := _limit(folder))]
    if not found:
        return None
    return Limit(min(one.bytes for one in found), min(one.free_bytes for one in found))


def oom_kills(membership: Path, root: Path, vmstat: Path) -> int | None:
    """How many processes the kernel has killed for want of memory: in this process's cgroup and
    those below it, or where that is not told, on the machine; None where neither is.

    membership, root: as of `cgroup_limit`. vmstat: /proc/vmstat, which counts kills for a cgroup's
    limit too. Version 1's own counter leaves out the cgroups below, and is not used.
    """
    for file in (*(folder / "memory.events" for folder in _folders(membership, root)), vmstat):
        found = dict(line.split() for line in _read(file).splitlines())
        if "oom_kill" in found:
            return int(found["oom_kill"])
    return None


def _folders(membership: Path, root: Path) -> Iterator[Path]:
    if not membership.is_file():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            top = root / "memory" if controllers else root
            inner = top / path.lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(top))


def _limit(folder: Path) -> Limit | None:
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        text = _read(folder / limit)
        if text.isdigit():
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            used = int(_read(folder / usage) or 0) - int(stat.get(cache, 0))
            return Limit(int(text), max(0, int(text) - used))
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # not of this version, or gone meanwhile
        return ""
