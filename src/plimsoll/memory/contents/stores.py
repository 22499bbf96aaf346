"""What a plan fills: cards and nodes' host memory. How full each is at every moment, when it is
fullest, and whether what it must hold fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Literal

from plimsoll.memory.contents.layout import Slot
from plimsoll.spec.run_spec import PHASES, Phase
from plimsoll.timeline.items import KINDS, Allocation, Item, Kind, Level, Moment

Verdict = Literal["fits", "risky", "does not fit"]
VERDICTS: tuple[Verdict, ...] = ("fits", "risky", "does not fit")
"""From the best to the worst."""


@dataclass(frozen=True)
class Band:
    """How far predictions are known to be off, as a share of the predicted bytes."""

    share: float
    source: str


@dataclass(frozen=True)
class Use:
    """All that is held at one moment; bytes.

    held: what each process has, item by item. gap: of the allocator, as `uses_of` takes it.
    """

    moment: Moment
    held: tuple[Item, ...]
    gap: float

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """Like items as one, and the allocator's gap; the largest first."""
        merged = merge(item for item in self.held if item.bytes)
        gap = [_gap_item(self.allocated, self.gap)] if self.gap and self.allocated else []
        return tuple(sorted([*merged, *gap], key=lambda item: -item.bytes))

    @property
    def stacks(self) -> dict[Kind, int]:
        """Bytes by kind, in the order of the kinds."""
        totals = dict.fromkeys(KINDS, 0)
        for item in self.items:
            totals[item.kind] += item.bytes
        return totals

    @cached_property
    def bytes(self) -> int:
        """All of it: what the device shows as used, or what the host's processes hold."""
        return sum(item.bytes for item in self.held) + self._gap_bytes

    @cached_property
    def allocated(self) -> int:
        """What torch counts as allocated."""
        return sum(item.bytes for item in self.held if item.level == "allocated")

    @property
    def reserved(self) -> int:
        """What torch counts as reserved: allocated, and the allocator's gap."""
        return self.allocated + self._gap_bytes

    @property
    def _gap_bytes(self) -> int:
        return round(self.gap * self.allocated)


def uses_of(held: Iterable[Allocation], gap: float = 0.0) -> tuple[Use, ...]:
    """What is held at every moment that any of these items names.

    gap: the allocator's reserved bytes above its allocated ones, as a share of the latter.
    """
    together: dict[frozenset[Moment], list[Item]] = {}
    for one in held:  # few kinds of lives among hundreds of items
        together.setdefault(one.moments, []).append(one.item)
    found: dict[Moment, list[Item]] = {}
    for moments, items in together.items():
        for moment in moments:
            found.setdefault(moment, []).extend(items)
    ordered = sorted(found, key=lambda moment: (PHASES.index(moment.phase), moment.instant))
    return tuple(Use(moment, tuple(found[moment]), gap) for moment in ordered)


def phase_peaks(uses: Iterable[Use]) -> tuple[Use, ...]:
    """The fullest instant of each phase, in the order of the phases."""
    found: dict[Phase, Use] = {}
    for use in uses:
        best = found.get(use.moment.phase)
        if best is None or use.bytes > best.bytes:
            found[use.moment.phase] = use
    return tuple(found[phase] for phase in PHASES if phase in found)


def fullest(uses: Iterable[Use]) -> Use:
    """The use with the most bytes; the first of equals."""
    return max(uses, key=lambda use: use.bytes)


def _gap_item(allocated: int, gap: float) -> Item:
    return Item(
        role="process",
        kind="processes",
        name="allocator gap",
        where="device",
        level="reserved",
        bytes=round(gap * allocated),
        formula=f"{gap:.0%} of {allocated:,} allocated bytes",
        source="constants: reserved over allocated bytes of PyTorch's caching allocator",
    )


def merge(items: Iterable[Item]) -> list[Item]:
    """Items of the same role, name and level as one: that of all processes together."""
    alike: dict[tuple[str, str, Level], list[Item]] = {}
    for item in items:
        alike.setdefault((item.role, item.name, item.level), []).append(item)
    return [_together(group) for group in alike.values()]


def _together(items: Sequence[Item]) -> Item:
    if len(items) == 1:
        return items[0]
    counts = Counter(item.formula for item in items)
    formula = " + ".join(f"{n} x ({f})" if n > 1 else f"({f})" for f, n in counts.items())
    return replace(items[0], bytes=sum(item.bytes for item in items), formula=formula)


@dataclass(frozen=True)
class Store:
    """A card, or a node's host memory; equal ones are one store with several slots.

    hardware: such as A100-80GB. capacity: usable bytes; None where unknown. held: everything that
    any of its processes ever holds there. gap: of the allocator, as `uses_of` takes it.
    """

    where: Literal["device", "host"]
    slots: tuple[Slot, ...]
    hardware: str
    capacity: int | None
    held: tuple[Allocation, ...]
    gap: float

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """Every moment."""
        return uses_of(self.held, self.gap)

    @cached_property
    def phases(self) -> tuple[Use, ...]:
        """The fullest instant of each phase."""
        return phase_peaks(self.uses)

    @property
    def peak(self) -> Use:
        """The fullest instant of all."""
        return fullest(self.uses)

    @property
    def place(self) -> str:
        """What it is, in a word."""
        return "node" if self.where == "host" else "card"

    @property
    def name(self) -> str:
        """Such as `8 x A100-80GB (node 0, cards 0-7)`."""
        count = f"{len(self.slots)} x " if len(self.slots) > 1 or self.where == "device" else ""
        return f"{count}{self.hardware} ({slots_text(self.slots)})"

    @property
    def without_engines(self) -> Store:
        """What all but the rollout engines hold."""
        return self.without(lambda item: item.role == "rollout")

    def without(self, unwanted: Callable[[Item], bool]) -> Store:
        """The same without some of its items."""
        return replace(self, held=tuple(one for one in self.held if not unwanted(one.item)))


def verdict_of(store: Store, band: Band) -> Verdict:
    """A peak over the capacity does not fit; one that the band could carry over it is risky. What
    vLLM takes of a card is set, not predicted, so no band is added to it. Nothing is said against
    a host of unknown memory."""
    peak = store.peak
    if store.capacity is None:
        return "fits"
    if peak.bytes > store.capacity:
        return "does not fit"
    return "risky" if likely_worst(peak, band) > store.capacity else "fits"


def likely_worst(use: Use, band: Band) -> float:
    """Bytes of a use where its predictions are as much too low as the band says."""
    exact = sum(item.bytes for item in use.held if item.role == "rollout")
    return use.bytes + band.share * (use.bytes - exact)


def slots_text(slots: Sequence[Slot]) -> str:
    """Such as `node 0, cards 0-7` or `nodes 0-3`."""
    nodes = sorted({slot.node for slot in slots})
    cards = sorted({slot.card for slot in slots if slot.card is not None})
    text = f"node{'s' * (len(nodes) > 1)} {_ranges(nodes)}"
    return f"{text}, card{'s' * (len(cards) > 1)} {_ranges(cards)}" if cards else text


def _ranges(numbers: Sequence[int]) -> str:
    runs = [
        [number for _, number in group]
        for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
