"""Make a cgroup (version 2) that limits processes together, where this process may.

This process cannot limit a cgroup below its own, because a cgroup with limits below it must not
hold processes itself. So the new one is made beside its own: root may, and so may a user in a scope
of systemd's (`systemd-run --user --scope`) or in another delegated cgroup.
Source: the kernel's Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from plimsoll.machine.cgroup import MEMBERSHIP, ROOT

_count = itertools.count()


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
        membership: See cgroup.py.
        root: See cgroup.py.
    """
    if not (root / "cgroup.controllers").is_file():
        return None
    (path,) = (line[3:] for line in membership.read_text().splitlines() if line[:3] == "0::")
    ours = root / path.lstrip("/")
    parent = ours if ours == root else ours.parent  # processes may be in the root itself
    folder = parent / f"plimsoll-{os.getpid()}-{next(_count)}"
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
