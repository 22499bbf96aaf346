"""What a plan fills: cards and nodes' host memory, and whether what they must hold fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Literal

from plimsoll.memory.contents.layout import Slot
from plimsoll.memory.contents.peaks import Use, fullest, phase_peaks, uses_of
from plimsoll.memory.items import Held, Item

Verdict = Literal["fits", "risky", "does not fit"]
VERDICTS: tuple[Verdict, ...] = ("fits", "risky", "does not fit")
"""From the best to the worst."""


@dataclass(frozen=True)
class Band:
    """How far predictions are known to be off, as a share of the predicted bytes."""

    share: float
    source: str


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
    held: tuple[Held, ...]
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
    def name(self) -> str:
        """Such as `8 x A100-80GB (node 0, cards 0-7)`."""
        count = f"{len(self.slots)} x " if len(self.slots) > 1 or self.where == "device" else ""
        return f"{count}{self.hardware} ({slots_text(self.slots)})"

    def without(self, unwanted: Callable[[Item], bool]) -> Store:
        """The same without some of its items."""
        return replace(self, held=tuple(one for one in self.held if not unwanted(one.item)))


def judge(store: Store, band: Band) -> Verdict:
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
