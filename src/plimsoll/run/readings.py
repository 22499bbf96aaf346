"""What the processes of a run are seen to hold, and were planned to; and the few numbers that this
comes down to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one process, predicted or measured.

    host: its resident memory. allocated, reserved: by torch's allocator on its card. device: all
    that the card shows as used, whoever uses it. The last three are None without a card.
    """

    host: int
    allocated: int | None = None
    reserved: int | None = None
    device: int | None = None

    @property
    def fullest(self) -> int:
        """What its line is held against: the card's bytes, on CPU those of the host."""
        return self.host if self.device is None else self.device


@dataclass(frozen=True, slots=True)
class Line:
    """How full a card or a node was, by all that uses it; and how full it can be. Bytes."""

    used: int
    capacity: int


@dataclass(frozen=True)
class HostReading:
    """A process (with its children, where it has any) on its node; bytes.

    node: the machine's name. peak: its largest resident memory since the reading before. held: its
    resident memory now. used, capacity: of the node now, by all that runs there.
    """

    node: str
    peak: int
    held: int
    used: int
    capacity: int


@dataclass(frozen=True)
class CardReading:
    """A process on its card; bytes.

    peak_allocated, peak_reserved: torch's peaks since the reading before. allocated, reserved: now.
    used, capacity: of the card now, by all that runs there (`cudaMemGetInfo`). busy: the share of
    the time since the reading before in which something computed there; None where NVML does not
    tell.
    """

    peak_allocated: int
    peak_reserved: int
    allocated: int
    reserved: int
    used: int
    capacity: int
    busy: float | None = None

    @property
    def peak_used(self) -> int:
        """What the card showed when this process had reserved most, if all else stayed."""
        return self.used + self.peak_reserved - self.reserved

    @property
    def line(self) -> Line:
        """How full it was at that moment."""
        return Line(self.peak_used, self.capacity)


@dataclass(frozen=True)
class Share:
    """What one rank holds of what ZeRO divides of a role; bytes.

    what: `weights` (stage 3) or `fp32 masters` (stages 1 and 2). whole: of all ranks together.
    """

    role: str
    what: str
    whole: int
    ranks: int
    held: int


@dataclass(frozen=True)
class Reading:
    """A process at the end of a phase; card: None on CPU. shares: of a rank's roles."""

    host: HostReading
    card: CardReading | None = None
    shares: tuple[Share, ...] = ()

    @property
    def peak(self) -> Footprint:
        """At its fullest since the reading before."""
        if self.card is None:
            return Footprint(self.host.peak)
        card = self.card
        return Footprint(self.host.peak, card.peak_allocated, card.peak_reserved, card.peak_used)

    @property
    def held(self) -> Footprint:
        """Now."""
        if self.card is None:
            return Footprint(self.host.held)
        card = self.card
        return Footprint(self.host.held, card.allocated, card.reserved, card.used)


def largest(one: Footprint, other: Footprint) -> Footprint:
    """The larger of each number."""

    def larger(name: str) -> int | None:
        both = (getattr(one, name), getattr(other, name))
        return max((size for size in both if size is not None), default=None)

    card = (larger(name) for name in ("allocated", "reserved", "device"))
    return Footprint(max(one.host, other.host), *card)


def total(footprints: Sequence[Footprint]) -> Footprint:
    """Together, on their host."""
    return Footprint(sum(one.host for one in footprints))


Footprints = dict[str, Footprint]
"""By phase."""


@dataclass(frozen=True)
class Planned:
    """What was planned of a run before it began, as far as the run needs it.

    plan: as JSON; None where there is none. predicted: what each process should hold at
    its fullest, by process and phase. fits: False for a run that was forced, though its plan does
    not fit. tokens_at_peak: a second, if its cards multiplied at their peak; None where that is not
    known, as on CPUs.
    """

    plan: str | None = None
    predicted: Mapping[str, Footprints] = field(default_factory=dict)
    fits: bool = True
    tokens_at_peak: float | None = None
