"""What is free on a node, what the run holds of it, and who holds the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import psutil

from plimsoll.machine.cgroup import oom_kills
from plimsoll.machine.host import live_host
from plimsoll.machine.nvidia import LiveCard, live_cards

_SHOWN = 5


@dataclass(frozen=True)
class Holder:
    """A process and the host memory that it alone holds; bytes."""

    pid: int
    name: str
    bytes: int


@dataclass(frozen=True)
class NodeState:
    """A node's memory at one time; bytes.

    capacity: what all processes may fill. own: what the run's processes hold. others: those who
    hold most besides. kills: how many processes the kernel has killed for want of memory since it
    started; None where it does not tell. pids: of the run's processes.
    """

    capacity: int
    free: int
    own: int
    others: tuple[Holder, ...]
    kills: int | None
    cards: tuple[LiveCard, ...] = ()
    pids: frozenset[int] = frozenset()

    @property
    def room(self) -> int:
        """What the run can have here."""
        return min(self.capacity, self.free + self.own)


def read_node(run: Collection[int]) -> NodeState:
    """This node, now. run: ids of the run's processes here; those below them count too.

    Raises PlimsollError when NVIDIA's driver is there and fails.
    """
    own = _with_children(run)
    holders = list(_holders())
    others = sorted((h for h in holders if h.pid not in own), key=lambda h: -h.bytes)
    host = live_host()
    return NodeState(
        host.capacity_bytes,
        host.free_bytes,
        sum(h.bytes for h in holders if h.pid in own),
        tuple(others[:_SHOWN]),
        oom_kills(),
        live_cards(),
        own,
    )


def _with_children(pids: Collection[int]) -> frozenset[int]:
    parents = {p.pid: p.info["ppid"] for p in psutil.process_iter(["ppid"])}
    own = frozenset(pids)
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return own


def _holders() -> Iterator[Holder]:
    for process in psutil.process_iter(["name", "memory_info"]):
        memory = process.info["memory_info"]
        if memory is not None:
            # Pages of files and of shared memory can be had again, or are not one process's.
            alone = memory.rss - getattr(memory, "shared", 0)
            yield Holder(process.pid, process.info["name"] or "?", alone)
