"""A node as a run finds it: what is the run's, what is others', and what the kernel has killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from plimsoll.machine.cgroup import oom_kills
from plimsoll.machine.incident import NodeState, read_node

HUNGRY = "import sys; held = b'x' * 200_000_000; print('full', flush=True); sys.stdin.read()"


def test_a_child_is_the_runs_and_a_stranger_is_not() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HUNGRY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"full\n"
        ours, nobodys = read_node([os.getpid()]), read_node([])
    finally:
        child.communicate()
    assert ours.own > 200_000_000 and nobodys.own == 0
    assert child.pid not in [holder.pid for holder in ours.others]
    sizes = [holder.bytes for holder in nobodys.others]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 200_000_000
    assert 0 < ours.room <= ours.capacity == nobodys.capacity


def test_room_is_what_is_free_and_what_the_run_holds() -> None:
    assert NodeState(100, free=30, own=20, others=(), kills=0).room == 50
    assert NodeState(100, free=90, own=20, others=(), kills=0).room == 100


def test_kills_are_the_own_cgroups_or_else_the_machines(tmp_path: Path) -> None:
    root, member, vmstat = tmp_path / "sys", tmp_path / "cgroup", tmp_path / "vmstat"
    (root / "job").mkdir(parents=True)
    member.write_text("0::/job\n")
    assert oom_kills(member, root, vmstat) is None
    vmstat.write_text("nr_free_pages 12\noom_kill 7\n")
    assert oom_kills(member, root, vmstat) == 7
    (root / "job" / "memory.events").write_text("low 0\nmax 3\noom 2\noom_kill 2\n")
    assert oom_kills(member, root, vmstat) == 2
