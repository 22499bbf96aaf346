"""How full a card or a node's host memory is at each moment, and when it is fullest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from plimsoll.memory.items import Held, Item, Level, Moment
from plimsoll.spec.run_spec import PHASES, Phase


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


def uses_of(held: Iterable[Held], gap: float = 0.0) -> tuple[Use, ...]:
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
    return tuple(Use(moment, tuple(found[moment]), gap) for moment in sorted(found, key=_order))


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


def _order(moment: Moment) -> tuple[int, str]:
    return PHASES.index(moment.phase), moment.instant
