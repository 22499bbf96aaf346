"""What cgroups leave to this process: memory, cores' time, processes.

membership is /proc/self/cgroup and root /sys/fs/cgroup, of version 1 (a hierarchy for each
controller) or 2. A container often sees its own cgroup as the root.
Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEMBERSHIP, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limit:
    """What cgroups allow: bytes in all, and what is still free of it (file caches count as free,
    for the kernel gives them back)."""

    bytes: int
    free_bytes: int


def memory_limit(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Limit | None:
    """Of this process's cgroup and those above it; None without any.

    Version 2 has memory.max with `max` for none, version 1 memory.limit_in_bytes with a number near
    2**63 for none.
    """
    folders = _folders(membership, root, "memory")
    found = [limit for folder in folders if (limit := _limit(folder))]
    if not found:
        return None
    return Limit(min(one.bytes for one in found), min(one.free_bytes for one in found))


def core_quota(membership: Path = MEMBERSHIP, root: Path = ROOT) -> float | None:
    """How many cores' time this process's cgroup and those above it give to it; None without any
    quota.

    Version 2 has cpu.max, such as `150000 100000`, with `max` for none, version 1 cpu.cfs_quota_us,
    with -1 for none.
    """
    quotas = (_quota(folder) for folder in _folders(membership, root, "cpu"))
    return min((quota for quota in quotas if quota), default=None)


def process_limit(membership: Path = MEMBERSHIP, root: Path = ROOT) -> int | None:
    """How many processes and threads may be in this process's cgroup and those above it; None
    without any limit."""
    texts = (_read(folder / "pids.max") for folder in _folders(membership, root, "pids"))
    return min((int(text) for text in texts if text.isdigit()), default=None)


def oom_kills(
    membership: Path = MEMBERSHIP, root: Path = ROOT, vmstat: Path = Path("/proc/vmstat")
) -> int | None:
    """How many processes the kernel has killed for want of memory: in this process's cgroup and
    those below it, or where that is not told, on the machine; None where neither is.

    vmstat: /proc/vmstat, which counts kills for a cgroup's limit too. Version 1's own counter
    leaves out the cgroups below, and is not used.
    """
    folders = _folders(membership, root, "memory")
    for file in (*(folder / "memory.events" for folder in folders), vmstat):
        found = dict(line.split() for line in _read(file).splitlines())
        if "oom_kill" in found:
            return int(found["oom_kill"])
    return None


def _folders(membership: Path, root: Path, controller: str) -> Iterator[Path]:
    """This process's own, then those above it."""
    if not membership.is_file():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = root / controller if controllers else root
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


def _quota(folder: Path) -> float | None:
    parts = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    match " ".join(_read(folder / part) for part in parts).split():
        case [quota, period] if quota.isdigit():
            return int(quota) / int(period)
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # not of this version, or gone meanwhile
        return ""
