"""What the processes of a run hold, planned and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one process, predicted or measured.

    The bytes on a card are None for a process without one.
    """

    host: int
    """Resident memory."""
    allocated: int | None = None
    """Bytes that torch's allocator gave to tensors."""
    reserved: int | None = None
    """Bytes that torch's allocator took from the card."""
    device: int | None = None
    """All that the card shows as used, by any process."""

    @property
    def fullest(self) -> int:
        """The bytes that count against the load line: the card's, or the host's on CPU."""
        return self.host if self.device is None else self.device


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes in use of a card or a node, by all processes, and its capacity."""

    used: int
    capacity: int


@dataclass(frozen=True)
class HostReading:
    """A process and its children on a node, in bytes."""

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
    """A process on its card, in bytes."""

    peak_allocated: int
    """Torch's peak since the last reading."""
    peak_reserved: int
    """Torch's peak since the last reading."""
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
        """What the card showed at this process's peak, if everything else stayed the same."""
        return self.used + self.peak_reserved - self.reserved

    @property
    def line(self) -> Line:
        """Fill of the card at that moment."""
        return Line(self.peak_used, self.capacity)


@dataclass(frozen=True)
class DividedShare:
    """What one rank holds of a role that ZeRO divides, in bytes."""

    role: str
    what: str
    """`weights` (stage 3) or `fp32 masters` (stages 1 and 2)."""
    whole: int
    """Bytes of all ranks together."""
    ranks: int
    held: int


@dataclass(frozen=True)
class Reading:
    """A process at the end of a phase."""

    host: HostReading
    card: CardReading | None = None
    """None on CPU."""
    shares: tuple[DividedShare, ...] = ()
    """What a rank holds of its roles."""

    @property
    def peak(self) -> Footprint:
        """Footprint at its largest since the last reading."""
        if self.card is None:
            return Footprint(self.host.peak)
        card = self.card
        return Footprint(self.host.peak, card.peak_allocated, card.peak_reserved, card.peak_used)

    @property
    def held(self) -> Footprint:
        """Footprint now."""
        if self.card is None:
            return Footprint(self.host.held)
        card = self.card
        return Footprint(self.host.held, card.allocated, card.reserved, card.used)


def largest(a: Footprint, b: Footprint) -> Footprint:
    """Return the larger of each number."""

    def larger(name: str) -> int | None:
        both = (getattr(a, name), getattr(b, name))
        return max((size for size in both if size is not None), default=None)

    card = (larger(name) for name in ("allocated", "reserved", "device"))
    return Footprint(max(a.host, b.host), *card)


def total(footprints: Sequence[Footprint]) -> Footprint:
    """Return the host memory of several footprints together."""
    return Footprint(sum(footprint.host for footprint in footprints))


Footprints = dict[str, Footprint]
"""Footprints by phase."""


@dataclass(frozen=True)
class Planned:
    """What a run needs of the plan that was made before it began."""

    plan: str | None = None
    """JSON text of the plan; None if there is no plan."""
    predicted: Mapping[str, Footprints] = field(default_factory=dict)
    """Peak of each process, by process and phase."""
    fits: bool = True
    """False for a run that was forced although its plan does not fit."""
    tokens_at_peak: float | None = None
    """Tokens per second if the cards multiplied at their peak; None if unknown, as on CPUs."""
