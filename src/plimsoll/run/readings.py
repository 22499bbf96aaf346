"""The planned and the measured memory of a run's processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one process, predicted or measured.

    The fields for card memory are None for a process without a card.
    """

    host: int
    """Resident memory."""
    allocated: int | None = None
    """Bytes that torch's allocator gave to tensors."""
    reserved: int | None = None
    """Bytes that torch's allocator took from the card."""
    device: int | None = None
    """All used memory of the card, by any process."""

    @property
    def fullest(self) -> int:
        """The bytes that count against the load line: the card's, or the host's on CPU."""
        return self.host if self.device is None else self.device


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes of a card or a node that all processes use, and its capacity in bytes."""

    used: int
    capacity: int


@dataclass(frozen=True)
class HostReading:
    """The host memory of a process and its children, and of their node, in bytes."""

    node: str
    """Name of the machine."""
    peak: int
    """Largest resident memory since the last reading."""
    held: int
    """Resident memory now."""
    used: int
    """Used memory of the node now, by all processes."""
    capacity: int
    """Memory of the node."""


@dataclass(frozen=True)
class CardReading:
    """The card memory of a process, and of its card, in bytes."""

    peak_allocated: int
    """Peak of torch's allocated bytes since the last reading."""
    peak_reserved: int
    """Peak of torch's reserved bytes since the last reading."""
    allocated: int
    reserved: int
    used: int
    """Used memory of the card now, by all processes (`cudaMemGetInfo`)."""
    capacity: int
    busy: float | None = None
    """Share of the time since the last reading in which the card computed; None if NVML does not
    know."""

    @property
    def peak_used(self) -> int:
        """Used memory of the card at this process's peak, if other processes used the same."""
        return self.used + self.peak_reserved - self.reserved

    @property
    def line(self) -> Line:
        """Fill of the card at this process's peak, and the card's capacity."""
        return Line(self.peak_used, self.capacity)


@dataclass(frozen=True)
class DividedShare:
    """The bytes that one rank holds of a role's tensors that ZeRO divides."""

    role: str
    what: str
    """`weights` (stage 3) or `fp32 masters` (stages 1 and 2)."""
    whole: int
    """Bytes of the undivided tensors: all ranks together."""
    ranks: int
    held: int


@dataclass(frozen=True)
class Reading:
    """The memory of a process, read at the end of a phase."""

    host: HostReading
    card: CardReading | None = None
    """None on CPU."""
    shares: tuple[DividedShare, ...] = ()
    """The rank's shares of the roles that ZeRO divides."""

    @property
    def peak(self) -> Footprint:
        """The largest footprint since the last reading."""
        if self.card is None:
            return Footprint(self.host.peak)
        card = self.card
        return Footprint(self.host.peak, card.peak_allocated, card.peak_reserved, card.peak_used)

    @property
    def held(self) -> Footprint:
        """The footprint at the time of the reading."""
        if self.card is None:
            return Footprint(self.host.held)
        card = self.card
        return Footprint(self.host.held, card.allocated, card.reserved, card.used)


def largest(a: Footprint, b: Footprint) -> Footprint:
    """Return a footprint that has the larger value of `a` and `b` in each field."""

    def larger(name: str) -> int | None:
        both = (getattr(a, name), getattr(b, name))
        return max((size for size in both if size is not None), default=None)

    card = (larger(name) for name in ("allocated", "reserved", "device"))
    return Footprint(max(a.host, b.host), *card)


def total(footprints: Sequence[Footprint]) -> Footprint:
    """Return a footprint with the sum of the host memory; its card fields are None."""
    return Footprint(sum(footprint.host for footprint in footprints))


Footprints = dict[str, Footprint]
"""Footprints by phase."""


@dataclass(frozen=True)
class Planned:
    """The parts of the memory plan that a run uses."""

    plan: str | None = None
    """JSON text of the plan; None if there is no plan."""
    predicted: Mapping[str, Footprints] = field(default_factory=dict)
    """Predicted peaks by process and phase."""
    fits: bool = True
    """False for a run that was forced although its plan does not fit."""
    explain: Callable[[Any, str], str] | None = None
    """Explains an incident (`plimsoll.machine.incident.Incident`) in a phase, given by its name."""
    tokens_at_peak: float | None = None
    """Tokens per second if the cards reached their peak FLOPs; None if unknown, as on CPUs."""
    checkpoint_bytes: int = 0
    """Predicted bytes of one checkpoint; 0 if there is no plan."""
