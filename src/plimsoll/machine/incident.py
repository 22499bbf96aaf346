"""Records of a process that ran out of memory, and of its node's memory before and after.

A node's memory is divided into free bytes, the run's bytes, and the bytes of other processes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import psutil

from plimsoll.errors import PlimsollError
from plimsoll.machine.cgroup import oom_kills
from plimsoll.machine.host import live_host
from plimsoll.machine.nvidia import LiveCard, live_cards
from plimsoll.machine.processes import families
from plimsoll.run.readings import DividedShare, Footprint, Reading

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
        """The bytes that the run could hold on this node: its own and the free ones."""
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


@dataclass(frozen=True)
class Sighting:
    """The state of the cluster around a process that failed."""

    process: str
    """The name of the process in plan and ledger, such as `rank 1`."""
    node: str
    """The name of its node."""
    card: int | None = None
    """The number of its card on the node; None on CPU, or if it is unknown."""
    before: NodeState | None = None
    """The node when the run started; None if it was not read."""
    after: NodeState | None = None
    """The node now; None if it was not read."""
    nodes: Mapping[str, str] = field(default_factory=dict)
    """The node of each process of the run."""
    readings: Mapping[str, Reading] = field(default_factory=dict)
    """The last reading of each process."""

    @property
    def last(self) -> Reading | None:
        """The last reading of the process."""
        return self.readings.get(self.process)


@dataclass(frozen=True)
class Incident:
    """A process that ran out of memory."""

    where: Literal["device", "host"]
    """The memory that ran out."""
    why: str
    """The message of the error."""
    role: str | None = None
    """The role whose model was in use; None if unknown."""
    asked: int | None = None
    """The bytes that could not be allocated."""
    held: Footprint | None = None
    """The memory of the process then."""
    shares: tuple[DividedShare, ...] = ()
    """The shares of its roles."""
    seen: Sighting | None = None
    """The observations of the cluster; None until there are any."""
    phase: str | None = None
    """The phase of the run; None until the run has added it."""


class OutOfMemory(PlimsollError):
    """A process of the run ran out of memory, or was killed for lack of it. Exit code 1."""

    fault = "error"

    def __init__(self, text: str, incident: Incident) -> None:
        super().__init__(text, incident)  # both arguments, so that the exception pickles
        self.text = text
        self.incident = incident

    def __str__(self) -> str:
        return self.text

    def in_phase(self, phase: str) -> OutOfMemory:
        """Return this error with the phase of the run."""
        return OutOfMemory(self.text, replace(self.incident, phase=phase))

    def with_sighting(self, text: str, seen: Sighting) -> OutOfMemory:
        """Return this error with another message and the cluster's sighting."""
        return OutOfMemory(text, replace(self.incident, seen=seen))
