"""A node as a run finds it: what is the run's, what is others', and what the kernel has killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from plimsoll.memory.machine.host import oom_kills
from plimsoll.memory.machine.node_state import NodeState, read_node

HUNGRY = "import sys; held = b'x' * 200_000_000; print('full', flush=True); sys.stdin.read()"


def test_a_child_is_the_runs_and_a_stranger_is_not() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HUNGRY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"full\n"
        ours, theirs = read_node([os.getpid()]), read_node([1])
    finally:
        child.communicate()
    assert ours.own > 200_000_000
    assert child.pid not in [holder.pid for holder in ours.others]
    only = {holder.pid: holder.bytes for holder in read_node([]).others}
    assert only == {} or max(only.values()) > 0
    assert child.pid in [h.pid for h in theirs.others] or len(theirs.others) == 5
    assert ours.capacity == theirs.capacity
    assert 0 < ours.room <= ours.capacity
    assert ours.others == tuple(sorted(ours.others, key=lambda holder: -holder.bytes))
    assert all(psutil.pid_exists(holder.pid) or holder.bytes for holder in ours.others)


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
