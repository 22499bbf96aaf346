"""A plan as JSON, for programs: `plimsoll plan --json` and `plan.json` in a run directory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from plimsoll.memory.advise.advise import Advice, Cluster, Suggestion
from plimsoll.memory.items import Item
from plimsoll.memory.plan.layout import Slot
from plimsoll.memory.plan.peaks import Use
from plimsoll.memory.plan.plan import Plan
from plimsoll.memory.plan.stores import Store
from plimsoll.memory.price.overheads import constant_values


def plan_values(plan: Plan, advice: Advice | None = None) -> dict[str, Any]:
    """Every card and host by itself. The items of one card (or host) and phase are those of the
    phase's fullest instant: they add up to its bytes. advice: None where none was asked for."""
    return {
        "verdict": plan.verdict,
        "band": plan.band.share,
        "devices": [row for store in plan.devices for row in _devices(store)],
        "hosts": [row for store in plan.hosts for row in _hosts(store)],
        "disk": {"bytes": plan.disk_bytes},
        "items": [
            *(row for store in (*plan.devices, *plan.hosts) for row in _items(store)),
            *(_item(item, "save", "written", "run directory") for item in plan.disk),
        ],
        "problems": [asdict(problem) for problem in plan.problems],
        "suggestions": [_suggestion(one) for one in advice.suggestions] if advice else [],
        "smallest_cluster": _cluster(advice.smallest_cluster) if advice else None,
        "shorter_sequences": _suggestion(advice.shorter) if advice and advice.shorter else None,
        "constants": constant_values(plan.constants),
    }


def slot_name(slot: Slot) -> str:
    """Such as `node 0 card 3`, or `node 0` for its host memory."""
    return f"node {slot.node}" if slot.card is None else f"node {slot.node} card {slot.card}"


def _devices(store: Store) -> Iterator[dict[str, Any]]:
    peak = {"phase": store.peak.moment.phase, **_measures(store.peak)}
    for slot in store.slots:
        yield {"device": slot_name(slot), "capacity_bytes": store.capacity, "peak": peak}


def _measures(use: Use) -> dict[str, int]:
    """What torch and the driver would show: a peak of each, at the same instant."""
    return {
        "allocated_bytes": use.allocated,
        "reserved_bytes": use.reserved,
        "device_bytes": use.bytes,
    }


def _hosts(store: Store) -> Iterator[dict[str, Any]]:
    peak = {"phase": store.peak.moment.phase, "bytes": store.peak.bytes}
    for slot in store.slots:
        yield {"node": slot.node, "capacity_bytes": store.capacity, "peak": peak}


def _items(store: Store) -> Iterator[dict[str, Any]]:
    for slot in store.slots:
        for use in store.phases:
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


def _suggestion(one: Suggestion) -> dict[str, Any]:
    return {
        "changes": [{"key": c.key, "from": c.before, "to": c.after} for c in one.changes],
        "flags": one.flags,
        "effect": one.effect,
        "smallest": one.smallest,
        "verdict": one.verdict,
        "device_bytes": one.device_bytes,
        "host_bytes": one.host_bytes,
        "relative_seconds": one.relative_seconds,
        "costs": list(one.costs),
    }


def _cluster(cluster: Cluster | None) -> dict[str, Any] | None:
    if cluster is None:
        return None
    return {"nodes": cluster.nodes, **_suggestion(cluster.suggestion)}
