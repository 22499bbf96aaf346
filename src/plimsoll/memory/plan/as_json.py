"""A plan as JSON values, for programs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from plimsoll.memory.contents.layout import Slot
from plimsoll.memory.contents.overheads import constant_values
from plimsoll.memory.contents.stores import Store
from plimsoll.memory.weigh import Plan
from plimsoll.timeline.items import Item

_OF_PROBLEMS = ("code", "severity", "what", "why", "fix")


def plan_values(plan: Plan) -> dict[str, Any]:
    """Return the plan with every card and host by itself.

    The items of a card (or host) and phase are those of the phase's fullest instant: they add up to
    its bytes.
    """
    return {
        "verdict": plan.verdict,
        "band": plan.band.share,
        "devices": [row for store in plan.devices for row in _devices(store)],
        "hosts": [row for store in plan.hosts for row in _hosts(store)],
        "disk": {"bytes": plan.disk_bytes},
        "items": [
            *(row for store in plan.stores for row in _items(store)),
            *(_item(item, "save", "written", "run directory") for item in plan.disk),
        ],
        "problems": [
            {key: getattr(problem, key) for key in _OF_PROBLEMS} for problem in plan.problems
        ],
        "constants": constant_values(plan.constants),
    }


def slot_name(slot: Slot) -> str:
    """Return the name of a slot: `node 0 card 3`, or `node 0` for its host memory."""
    return f"node {slot.node}" if slot.card is None else f"node {slot.node} card {slot.card}"


def _devices(store: Store) -> Iterator[dict[str, Any]]:
    """Yield each card with its peak: what torch and the driver would show at the same instant."""
    use = store.peak
    sizes = {"allocated_bytes": use.allocated, "reserved_bytes": use.reserved}
    peak = {"phase": use.moment.phase, **sizes, "device_bytes": use.bytes}
    for slot in store.slots:
        yield {"device": slot_name(slot), "capacity_bytes": store.capacity, "peak": peak}


def _hosts(store: Store) -> Iterator[dict[str, Any]]:
    peak = {"phase": store.peak.moment.phase, "bytes": store.peak.bytes}
    for slot in store.slots:
        yield {"node": slot.node, "capacity_bytes": store.capacity, "peak": peak}


def _items(store: Store) -> Iterator[dict[str, Any]]:
    for slot, use in product(store.slots, store.phases):
        for item in use.items:
            yield _item(item, use.moment.phase, use.moment.instant, slot_name(slot))


def _item(item: Item, phase: str, instant: str, device: str) -> dict[str, Any]:
    return {
        "role": item.role,
        "phase": phase,
        "instant": instant,
        "item": item.name,
        "where": item.where,
        "device": device,
        "bytes": item.bytes,
        "formula": item.formula,
        "source": item.source,
    }
