"""A plan as bars in a terminal: what is stacked in each phase, under the load line."""

from __future__ import annotations

from plimsoll.memory.contents.stores import Store, Use
from plimsoll.memory.plan.table import SHORT
from plimsoll.run.counting import gigabytes
from plimsoll.timeline.items import KINDS, Kind

_BAR = 56
_UNICODE = "█▓▒░▞▤▪·"
_ASCII = "#=+-%*o."


def draw_bars(store: Store, *, unicode: bool) -> str:
    """One bar a phase, with the load line where the store is full; 80 columns.

    unicode: draw with blocks; else with what every terminal has.
    """
    signs = dict(zip(KINDS, _UNICODE if unicode else _ASCII, strict=True))
    largest = max(store.peak.bytes, store.capacity or 0)
    limit = None if store.capacity is None else round(_BAR * store.capacity / largest)
    line = "│" if unicode else "|"
    bars = [_bar(use, signs, largest, limit, line) for use in store.phases]
    used = {item.kind for use in store.phases for item in use.items}
    return "\n".join([store.name, *bars, *_legend([kind for kind in KINDS if kind in used], signs)])


def stacks(use: Use) -> dict[Kind, int]:
    """Bytes by kind, in the order of the kinds."""
    totals = dict.fromkeys(KINDS, 0)
    for item in use.items:
        totals[item.kind] += item.bytes
    return totals


def _bar(use: Use, signs: dict[Kind, str], largest: int, limit: int | None, line: str) -> str:
    cells, filled, drawn = "", 0, 0
    for kind, size in stacks(use).items():
        filled += size
        width = round(_BAR * filled / largest)
        cells += signs[kind] * (width - drawn)
        drawn = width
    cells = f"{cells:<{_BAR}}"
    if limit is not None:
        cells = cells[:limit] + line + cells[limit:]
    phase = SHORT.get(use.moment.phase, use.moment.phase)
    return f"  {phase:<8}{cells}{gigabytes(use.bytes):>9}"


def _legend(kinds: list[Kind], signs: dict[Kind, str]) -> list[str]:
    entries = [f"{signs[kind]} {kind}" for kind in kinds]
    lines = ["         "]
    for entry in entries:
        if len(lines[-1]) + len(entry) > 76:
            lines.append("         ")
        lines[-1] += f" {entry} "
    return [line.rstrip() for line in lines]
