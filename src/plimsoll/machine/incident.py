"""What is known of a process that ran out of memory, and of its node before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from plimsoll.errors import PlimsollError
from plimsoll.machine.node_state import NodeState
from plimsoll.run.readings import Footprint, Reading, Share


@dataclass(frozen=True)
class Sighting:
    """What the cluster saw around a process.

    process: as the plan and the ledger call it, such as `rank 1`. node: its node's name. card: the
    number of its card there; None on CPU, or where it is not known. before, after: its node when
    the run started, and now; None where it was not seen. nodes: where each process of the run is.
    readings: the last of each process.
    """

    process: str
    node: str
    card: int | None = None
    before: NodeState | None = None
    after: NodeState | None = None
    nodes: Mapping[str, str] = field(default_factory=dict)
    readings: Mapping[str, Reading] = field(default_factory=dict)

    @property
    def last(self) -> Reading | None:
        """The last reading of the process."""
        return self.readings.get(self.process)


@dataclass(frozen=True)
class Incident:
    """A process that ran out of memory.

    where: of which memory. why: in the words of who noticed. role: whose model was being worked
    with; None where the process could not tell. asked: bytes that were not to be had; held: what
    the process held then. shares: of its roles. seen: None until the cluster has looked. phase: of
    the run; None until the run has said.
    """

    where: Literal["device", "host"]
    why: str
    role: str | None = None
    asked: int | None = None
    held: Footprint | None = None
    shares: tuple[Share, ...] = ()
    seen: Sighting | None = None
    phase: str | None = None


class OutOfMemory(PlimsollError):
    """A process of the run ran out of memory, or was killed for want of it. Exit code 1."""

    def __init__(self, text: str, incident: Incident) -> None:
        super().__init__(text, incident)  # both, so that it pickles as it is
        self.text = text
        self.incident = incident

    def __str__(self) -> str:
        return self.text

    def in_phase(self, phase: str) -> OutOfMemory:
        """The same, once it is known in which phase of the run it was."""
        return OutOfMemory(self.text, replace(self.incident, phase=phase))

    def with_sighting(self, text: str, seen: Sighting) -> OutOfMemory:
        """The same in the cluster's words, with what it saw."""
        return OutOfMemory(text, replace(self.incident, seen=seen))
