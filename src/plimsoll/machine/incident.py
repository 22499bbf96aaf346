"""Records of a process that ran out of memory, and of its node before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from plimsoll.errors import PlimsollError
from plimsoll.machine.node_state import NodeState
from plimsoll.run.readings import DividedShare, Footprint, Reading


@dataclass(frozen=True)
class Sighting:
    """The observations of the cluster around a process."""

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
        """Return this error with the cluster's text and what the cluster saw."""
        return OutOfMemory(text, replace(self.incident, seen=seen))
