"""Read a node's memory: what is free, what the run holds, and who holds the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import psutil

from plimsoll.machine.cgroup import oom_kills
from plimsoll.machine.host import live_host
from plimsoll.machine.nvidia import LiveCard, live_cards
from plimsoll.machine.stacks import families

_SHOWN = 5


@dataclass(frozen=True)
class Holder:
    """A process and the host memory, in bytes, that it shares with no other process."""

    pid: int
    name: str
    bytes: int


@dataclass(frozen=True)
class NodeState:
    """A node's memory at one time, in bytes."""

    capacity: int
    """The bytes that all processes together may hold."""
    free: int
    own: int
    """The bytes that the run's processes hold."""
    others: tuple[Holder, ...]
    """The other processes that hold most."""
    kills: int | None
    """Processes that the kernel has killed for lack of memory since it started; None if unknown."""
    cards: tuple[LiveCard, ...] = ()
    pids: frozenset[int] = frozenset()
    """The ids of the run's processes."""

    @property
    def room(self) -> int:
        """The bytes that the run can have here."""
        return min(self.capacity, self.free + self.own)


def read_node(run: Collection[int]) -> NodeState:
    """Return the state of this node now.

    `run` are the ids of the run's processes here. Their child processes count as the run's, too.
    Raises PlimsollError if NVIDIA's driver is installed and fails.
    """
    run_pids = frozenset(run) | {process.pid for process in families(run)}
    holders = list(_holders())
    others = sorted((h for h in holders if h.pid not in run_pids), key=lambda h: -h.bytes)
    host = live_host()
    return NodeState(
        host.capacity_bytes,
        host.free_bytes,
        sum(h.bytes for h in holders if h.pid in run_pids),
        tuple(others[:_SHOWN]),
        oom_kills(),
        live_cards(),
        run_pids,
    )


def _holders() -> Iterator[Holder]:
    for process in psutil.process_iter(["name", "memory_info"]):
        memory = process.info["memory_info"]
        if memory is not None:
            # Pages of files can be freed, and pages of shared memory belong to several processes.
            alone = memory.rss - getattr(memory, "shared", 0)
            yield Holder(process.pid, process.info["name"] or "?", alone)
