"""Predicted and measured memory of cards and hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plimsoll.page.memory import memory
from plimsoll.page.watched import watch_runs
from plimsoll.run.directory import RunDirectory
from plimsoll.run.files import write_whole
from plimsoll.run.json_lines import document
from plimsoll.run.ledger import LedgerRow, write_ledger
from plimsoll.run.readings import Footprint, Line


def item(device: str, phase: str, role: str, name: str, size: int) -> dict[str, Any]:
    where = "device" if "card" in device else "host"
    about = {"formula": "2 x 3", "source": "code", "instant": "forward", "where": where}
    return about | {"device": device, "phase": phase, "role": role, "item": name, "bytes": size}


def ledger_row(
    process: str, phase: str, host: int, device: int | None = None, planned: int | None = None
) -> LedgerRow:
    on_card = () if device is None else (1, 1, device)
    predicted = None if planned is None else Footprint(1, 1, 1, planned)
    measured = Footprint(host, *on_card)
    return LedgerRow(1, phase, process, "node 0", predicted, measured, measured, Line(50, 100), 1.0)


def shown(path: Path, plan: dict[str, Any] | None, *rows: LedgerRow) -> dict[str, Any]:
    run = RunDirectory(path)
    if plan is not None:
        write_whole(run.plan_path, document(plan))
    write_ledger(run.ledger_path, rows)
    (seen,) = watch_runs([path])
    return memory(seen.look())


def sizes(place: dict[str, Any]) -> dict[str, tuple[list[Any], list[Any]]]:
    """By phase: the predicted items, and the measured processes."""
    return {
        phase["name"]: (
            [(one["role"], one["item"], one["bytes"]) for one in phase["predicted"]],
            [(one["process"], one["bytes"]) for one in phase["measured"]],
        )
        for phase in place["phases"]
    }


def test_a_host_has_its_roles_and_items_beside_its_processes(tmp_path: Path) -> None:
    plan = {
        "verdict": "fits",
        "devices": [],
        "hosts": [{"device": "node 0", "nodes": [0], "capacity_bytes": 90}],
        "items": [
            item("node 0", "score", "reference", "weights", 7),
            item("node 0", "score", "actor", "weights", 5),
            item("node 0", "score", "actor", "moments", 6),
            {**item("run directory", "save", "actor", "checkpoints", 9), "where": "disk"},
        ],
    }
    found = shown(
        tmp_path,
        plan,
        ledger_row("rank 0", "score", 12),
        ledger_row("engine 0", "score", 8),
        ledger_row("node 0", "score", 20),
        ledger_row("rank 0", "data", 2),
    )
    (place,) = found["places"]
    assert (place["name"], place["capacity"], found["verdict"]) == ("node 0", 100, "fits")
    assert sizes(place) == {
        "data": ([], [("rank 0", 2)]),
        "score": (
            [("actor", "moments", 6), ("actor", "weights", 5), ("reference", "weights", 7)],
            [("rank 0", 12), ("engine 0", 8)],
        ),
    }


def test_cards_that_are_planned_alike_are_one_and_have_their_own_processes(tmp_path: Path) -> None:
    """Three cards: two hold a rank each, one an engine."""
    weights = [("node 0, cards 0-1", 5), ("node 0, card 2", 8)]
    plan = {
        "devices": [{"device": name, "capacity_bytes": 10} for name, _ in weights],
        "hosts": [],
        "items": [item(name, "rollout", "actor", "weights", size) for name, size in weights],
    }
    found = shown(
        tmp_path,
        plan,
        ledger_row("rank 0", "rollout", 1, device=4, planned=5),
        ledger_row("rank 1", "rollout", 1, device=6, planned=5),
        ledger_row("engine 0", "rollout", 1, device=9, planned=8),
    )
    assert [(place["name"], sizes(place)) for place in found["places"][:2]] == [
        (
            "node 0, cards 0-1",
            {"rollout": ([("actor", "weights", 5)], [("rank 1", 6)])},
        ),
        ("node 0, card 2", {"rollout": ([("actor", "weights", 8)], [("engine 0", 9)])}),
    ]


def node_row(node: str, process: str, host: int, capacity: int = 100) -> LedgerRow:
    held = Footprint(host)
    return LedgerRow(1, "score", process, node, None, held, held, Line(50, capacity), 1.0)


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ([{"device": "nodes 0-1", "nodes": [0, 1], "capacity_bytes": 90}], ["nodes 0-1"]),
        # as older versions wrote it
        ([{"node": node, "capacity_bytes": 90} for node in (0, 1)], ["node 0", "node 1"]),
    ],
)
def test_of_equal_hosts_the_fullest_is_shown(
    hosts: list[dict[str, Any]], names: list[str], tmp_path: Path
) -> None:
    items = [item(name, "score", "actor", "weights", 5) for name in names]
    rows = (
        *(node_row("node 0", "rank 0", 3), node_row("node 0", "rank 1", 4)),
        *(node_row("node 1", "rank 2", 6), node_row("node 1", "rank 3", 5)),
        *(node_row("node 0", "node 0", 7), node_row("node 1", "node 1", 11, capacity=80)),
    )
    found = shown(tmp_path, {"devices": [], "hosts": hosts, "items": items}, *rows)
    fullest = [("rank 2", 6), ("rank 3", 5)]
    measured = [fullest] if len(names) == 1 else [[("rank 0", 3), ("rank 1", 4)], fullest]
    assert [(place["name"], place["capacity"], sizes(place)) for place in found["places"]] == [
        (name, capacity, {"score": ([("actor", "weights", 5)], processes)})
        for name, capacity, processes in zip(
            names, [80] if len(names) == 1 else [100, 80], measured, strict=True
        )
    ]


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_without_a_plan_what_was_measured_is_shown(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        RunDirectory(tmp_path).plan_path.write_text(text)
    rows = (ledger_row("rank 0", "load", 3, device=7), ledger_row("node 0", "load", 3))
    found = shown(tmp_path, None, *rows)
    assert [place["name"] for place in found["places"]] == ["cards", "node 0"]
    assert sizes(found["places"][0]) == {"load": ([], [("rank 0", 7)])}


def test_nothing_is_measured_before_the_first_step(tmp_path: Path) -> None:
    assert shown(tmp_path, None)["table"] == []
