"""Read the limits that cgroups set on this process, and make cgroups that limit other processes.

The limits are of memory, CPU time and processes. `membership` is /proc/self/cgroup and `root` is
/sys/fs/cgroup, of version 1 (a hierarchy for each controller) or 2. A container often sees its own
cgroup as the root.

A new cgroup (version 2) is made beside this process's own. It cannot be below, because a cgroup
with limits below it must not hold processes itself. Root may make a cgroup, and so may a user in a
scope of systemd's (`systemd-run --user --scope`) or in another delegated cgroup.
Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

MEMBERSHIP, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_limit(membership: Path = MEMBERSHIP, root: Path = ROOT) -> tuple[int, int] | None:
    """Return the lowest memory limit, in bytes, of this cgroup and its parents; None if none.

    The second number is the free bytes below the limits. File caches count as free, as the kernel
    reclaims them.

    No limit is `max` in version 2's memory.max, and a number near 2**63 in version 1's
    memory.limit_in_bytes.
    """
    folders = _folders(membership, root, "memory")
    limits = [limit for folder in folders if (limit := _limit(folder))]
    return (min(limit for limit, _ in limits), min(free for _, free in limits)) if limits else None


def core_quota(membership: Path = MEMBERSHIP, root: Path = ROOT) -> float | None:
    """Return how many cores' worth of CPU time the cgroups allow; None if there is no quota.

    Version 2 has cpu.max, such as `150000 100000`, with `max` for none. Version 1 has
    cpu.cfs_quota_us, with -1 for none.
    """
    quotas = (_quota(folder) for folder in _folders(membership, root, "cpu"))
    return min((quota for quota in quotas if quota), default=None)


def oom_kills(
    membership: Path = MEMBERSHIP, root: Path = ROOT, vmstat: Path = Path("/proc/vmstat")
) -> int | None:
    """Return how many processes the kernel killed for lack of memory; None if it does not say.

    The count is that of this process's cgroup and the cgroups below. If there is none, it is the
    machine's (/proc/vmstat), which includes kills for a cgroup's limit. The counter of version 1 is
    not used, as it omits the cgroups below.
    """
    folders = _folders(membership, root, "memory")
    for file in (*(folder / "memory.events" for folder in folders), vmstat):
        counts = dict(line.split() for line in _read(file).splitlines())
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return None


def _folders(membership: Path, root: Path, controller: str) -> Iterator[Path]:
    if not membership.is_file():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = root / controller if controllers else root
            inner = top / path.lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(top))


def _limit(folder: Path) -> tuple[int, int] | None:
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        text = _read(folder / limit)
        if text.isdigit():
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            used = int(_read(folder / usage) or 0) - int(stat.get(cache, 0))
            return int(text), max(0, int(text) - used)
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
    except OSError:  # a file of the other version, or deleted meanwhile
        return ""


_cgroup_numbers = itertools.count()


def make_cgroup(
    memory_bytes: int,
    processes: int,
    pids: Iterable[int] = (),
    membership: Path = MEMBERSHIP,
    root: Path = ROOT,
) -> Path | None:
    """Return the folder of a new cgroup that holds some processes, or None if it cannot be made.

    Args:
        memory_bytes: The most memory of all processes in it together; none of it is swapped.
        processes: The most processes and threads in it.
        pids: The processes that are moved into it.
        membership: The file that names the cgroup of this process.
        root: The folder of all cgroups.
    """
    if not (root / "cgroup.controllers").is_file():
        return None
    (path,) = (line[3:] for line in membership.read_text().splitlines() if line[:3] == "0::")
    ours = root / path.lstrip("/")
    parent = ours if ours == root else ours.parent  # processes may be in the root itself
    folder = parent / f"plimsoll-{os.getpid()}-{next(_cgroup_numbers)}"
    limits = {"memory.max": memory_bytes, "memory.swap.max": 0, "pids.max": processes}
    try:
        folder.mkdir()
        for name, limit in limits.items():
            if name != "memory.swap.max" or (folder / name).exists():  # a kernel without swap
                with open(folder / name, "r+", encoding="ascii") as file:
                    file.write(str(limit))
        for pid in pids:
            (folder / "cgroup.procs").write_text(str(pid))
    except OSError:
        with suppress(OSError):
            folder.rmdir()
        return None
    return folder


def remove_cgroup(folder: Path) -> None:
    """Remove a cgroup as soon as its processes, which were killed, are gone."""
    until = time.monotonic() + 10.0
    while time.monotonic() < until:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)
