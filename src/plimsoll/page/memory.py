"""Predicted and measured memory of a run as JSON.

Each card and host has its phases, roles and items, beside its capacity.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, get_args

from plimsoll.page.ledger import compare, drop_lone_nodes, fullest_of_kinds
from plimsoll.page.watched import Watched
from plimsoll.run.ledger import LedgerRow, group_rows, is_node, process_kind
from plimsoll.run.phases import TimedPhase

PlanItem = Mapping[str, Any]
_PLACES = {phase: place for place, phase in enumerate(get_args(TimedPhase))}


def memory(run: Watched) -> dict[str, Any]:
    """Return the memory of a run, all in bytes.

    `places` are the kinds of cards and hosts with predicted and measured items. `table` has the
    comparisons of the ledger.
    """
    rows = run.ledger.rows
    plan = _plan(run)
    return {
        "verdict": plan.get("verdict"),
        "places": [*_cards(plan, rows), *_hosts(plan, rows)],
        "table": _table_rows(rows),
        "remarks": [],
    }


def _plan(run: Watched) -> Mapping[str, Any]:
    try:
        plan = json.loads(run.run.plan_path.read_bytes())
    except (OSError, ValueError):
        return {}
    return plan if isinstance(plan, dict) else {}


def _cards(plan: Mapping[str, Any], rows: Sequence[LedgerRow]) -> list[dict[str, Any]]:
    """Return an entry for each kind of card, with the fullest measured ones."""
    card_rows = [row for row in rows if row.measured.device is not None]
    items, places, kinds = _by_device(plan), [], plan.get("devices", ())
    for cards in kinds:
        name, capacity = cards["device"], cards["capacity_bytes"]
        predicted = items.get(name, ())
        totals = Counter[str]()
        for item in predicted:
            totals[item["phase"]] += item["bytes"]
        matching = [
            row
            for row in card_rows
            if len(kinds) == 1
            or (row.predicted is not None and row.predicted.device == totals.get(row.phase))
        ]
        places.append(describe_place(name, capacity, predicted, _fullest(matching)))
    if not kinds and card_rows:
        capacity = max(row.line.capacity for row in card_rows)
        places.append(describe_place("cards", capacity, (), _fullest(card_rows)))
    return places


def _hosts(plan: Mapping[str, Any], rows: Sequence[LedgerRow]) -> list[dict[str, Any]]:
    """Return an entry for each kind of host, with the processes of the fullest one in each phase.

    Hosts that are not in the plan have an entry each.
    """
    items, planned = _by_device(plan), dict[str, int | None]()
    kind_of: dict[str, str] = {}
    for kind in plan.get("hosts", ()):  # an older plan has an entry for each node
        name = kind.get("device", f"node {kind.get('node')}")
        planned[name] = kind["capacity_bytes"]
        kind_of |= {f"node {node}": name for node in kind.get("nodes", [kind.get("node")])}
    by_kind = group_rows(rows, lambda row: kind_of.get(row.node, row.node))
    places = []
    for name in dict.fromkeys([*planned, *by_kind]):
        of_kind = by_kind.get(name, [])
        capacities = [row.line.capacity for row in of_kind if is_node(row)]
        capacity = min(capacities, default=planned.get(name))
        measured = _fullest_host([row for row in of_kind if not is_node(row)])
        places.append(describe_place(name, capacity, items.get(name, ()), measured))
    return places


def describe_place(
    name: str,
    capacity: int | None,
    predicted: Iterable[PlanItem],
    measured: Iterable[tuple[LedgerRow, int]] = (),
) -> dict[str, Any]:
    """Return a card or host as JSON, with its predicted and measured bytes in each phase."""
    phases: dict[str, dict[str, Any]] = {}

    def phase(name: str) -> dict[str, Any]:
        return phases.setdefault(name, {"name": name, "predicted": [], "measured": []})

    for item in predicted:
        kept = {key: item[key] for key in ("role", "item", "bytes", "formula")}
        phase(item["phase"])["predicted"].append(kept)
    for row, size in measured:
        phase(row.phase)["measured"].append({"process": row.process, "bytes": size})
    for phase_values in phases.values():
        phase_values["predicted"].sort(key=lambda item: (item["role"], -item["bytes"]))
    ordered = sorted(phases, key=lambda phase: _PLACES.get(phase, len(_PLACES)))
    return {
        "name": name,
        "capacity": capacity,
        "phases": [phases[phase_name] for phase_name in ordered],
    }


def _by_device(plan: Mapping[str, Any]) -> dict[str, list[PlanItem]]:
    items: dict[str, list[PlanItem]] = {}
    for item in plan.get("items", ()):
        if item["where"] != "disk":
            items.setdefault(item["device"], []).append(item)
    return items


def _fullest(rows: Iterable[LedgerRow]) -> list[tuple[LedgerRow, int]]:
    """Return for each phase the row with the most bytes on a card, and these bytes."""
    ordered = sorted(rows, key=lambda row: row.phase)
    return [
        max(((row, row.measured.device or 0) for row in phase_rows), key=lambda pair: pair[1])
        for _, phase_rows in groupby(ordered, key=lambda row: row.phase)
    ]


def _fullest_host(rows: Sequence[LedgerRow]) -> list[tuple[LedgerRow, int]]:
    """Return for each phase the rows of the host whose processes hold the most, and their bytes."""
    held = Counter[tuple[str, str]]()
    for row in rows:
        held[row.phase, row.node] += row.measured.host
    fullest = {phase: node for (phase, node), _ in reversed(held.most_common())}
    return [(row, row.measured.host) for row in rows if fullest[row.phase] == row.node]


def _table_rows(rows: Sequence[LedgerRow]) -> list[dict[str, Any]]:
    """Return the fullest process of each kind in each phase.

    `several` is the number of processes of the kind. `measures` has, by name, [predicted or None,
    measured, over or None].
    """
    counted_rows = drop_lone_nodes(rows)
    kinds = [process_kind(process) for process in {row.process for row in counted_rows}]
    by_phase = groupby(
        fullest_of_kinds(compare(counted_rows)), lambda entry: (entry.process, entry.phase)
    )
    return [
        {
            "process": process,
            "phase": phase,
            "several": kinds.count(process_kind(process)),
            "measures": {e.measure: [e.predicted, e.measured, e.over] for e in entries},
        }
        for (process, phase), entries in by_phase
    ]
