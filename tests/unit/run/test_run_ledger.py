"""The ledger: what readings become, and what a file of them gives back."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.run.directory import RunDirectory
from plimsoll.run.json_lines import append_row, keep_rows_until
from plimsoll.run.ledger import (
    Leak,
    Ledger,
    LedgerFile,
    LedgerRow,
    MemoryUse,
    busy_share,
    memory_use,
    read_leaks,
    read_ledger,
    write_ledger,
)
from plimsoll.run.readings import CardReading, DividedShare, Footprint, HostReading, Line, Reading


def on_host(peak: int, held: int, node: str = "a", used: int = 500) -> Reading:
    return Reading(HostReading(node, peak, held, used, capacity=1000))


CARD = CardReading(
    peak_allocated=50, peak_reserved=70, allocated=30, reserved=60, used=90, capacity=200
)


def test_a_card_was_fullest_when_the_allocator_had_most() -> None:
    reading = Reading(HostReading("a", 11, 10, 500, 1000), CARD)
    assert reading.peak == Footprint(host=11, allocated=50, reserved=70, device=100)
    assert reading.held == Footprint(host=10, allocated=30, reserved=60, device=90)


def test_a_phase_gives_a_row_for_each_process_and_one_for_its_node() -> None:
    predicted = {"controller": {"score": Footprint(5)}, "rank 0": {"score": Footprint(30)}}
    ledger = Ledger(predicted, 0)
    ledger.add("score", {"controller": on_host(6, 4), "rank 0": on_host(40, 20, used=510)}, 1.5)
    controller, rank, node = ledger.take(3)
    assert controller == LedgerRow(
        step=3,
        phase="score",
        process="controller",
        node="node 0",
        predicted=Footprint(5),
        measured=Footprint(6),
        held=Footprint(4),
        line=Line(532, 1000),  # 510 in use at the end; at their peaks they held 2 and 20 more
        seconds=1.5,
    )
    assert (rank.process, rank.predicted) == ("rank 0", Footprint(30))
    assert (node.process, node.predicted) == ("node 0", Footprint(35))
    assert (node.measured, node.held) == (Footprint(46), Footprint(24))
    assert ledger.take(4) == []


def test_a_node_is_not_predicted_where_one_of_its_processes_is_not() -> None:
    ledger = Ledger({"rank 0": {"score": Footprint(30)}}, 0)
    ledger.add("score", {"controller": on_host(6, 4), "rank 0": on_host(40, 20)}, 1.0)
    assert [row.predicted for row in ledger.take(1)] == [None, Footprint(30), None]


def test_nodes_are_counted_from_the_first_and_keep_their_numbers() -> None:
    ledger = Ledger({}, 0)
    ledger.add("load", {"controller": on_host(1, 1, "b"), "rank 0": on_host(2, 2, "a")}, 1.0)
    ledger.add("score", {"rank 0": on_host(2, 2, "a"), "rank 1": on_host(3, 3, "a")}, 1.0)
    nodes = {(r.phase, r.process): r.measured.host for r in ledger.take(1) if "node" in r.process}
    assert nodes == {("load", "node 0"): 1, ("load", "node 1"): 2, ("score", "node 1"): 5}


def test_a_card_is_held_against_its_own_line() -> None:
    ledger = Ledger({}, 0)
    ledger.add("sync", {"rank 0": Reading(HostReading("a", 9, 9, 500, 1000), CARD)}, 1.0)
    rank, node = ledger.take(1)
    assert (rank.line, node.line) == (Line(100, 200), Line(500, 1000))
    assert node.measured == Footprint(9)


def test_a_phase_that_comes_twice_in_a_step_is_one_row() -> None:
    ledger = Ledger({}, 0)
    ledger.add("load", {"local": on_host(9, 5, used=700)}, 1.0)
    ledger.add("load", {"local": Reading(HostReading("a", 8, 7, 600, 1000), CARD)}, 2.0)
    row, _ = ledger.take(1)
    assert row.measured == Footprint(9, 50, 70, 100)
    assert (row.held.host, row.seconds, row.line) == (7, 3.0, Line(704, 1000))


def test_rows_come_back_from_the_file(tmp_path: Path) -> None:
    ledger = Ledger({"rank 0": {"sync": Footprint(1, 2, 3, 4)}}, 0)
    readings = {
        "rank 0": Reading(HostReading("a", 9, 9, 500, 1000), CARD),
        "controller": on_host(3, 2),
    }
    ledger.add("sync", readings, 0.25)
    rows = ledger.take(2)
    run = RunDirectory(tmp_path)
    write_ledger(run.ledger_path, rows)
    assert read_ledger(run.ledger_path) == rows
    first = json.loads(run.ledger_path.read_text().splitlines()[0])
    assert first == {
        "step": 2,
        "phase": "sync",
        "process": "rank 0",
        "rank": 0,
        "node": "node 0",
        "predicted": {
            "host_bytes": 1,
            "allocated_bytes": 2,
            "reserved_bytes": 3,
            "device_bytes": 4,
        },
        "measured": {
            "host_bytes": 9,
            "allocated_bytes": 50,
            "reserved_bytes": 70,
            "device_bytes": 100,
        },
        "held": {
            "host_bytes": 9,
            "allocated_bytes": 30,
            "reserved_bytes": 60,
            "device_bytes": 90,
        },
        "line": {"used_bytes": 100, "capacity_bytes": 200},
        "seconds": 0.25,
    }


def test_a_resumed_run_drops_the_rows_of_steps_that_are_done_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in (1, 2, 3):
        ledger = Ledger({}, 0)
        ledger.add("sync", {"local": on_host(9, 9)}, 1.0)
        write_ledger(run.ledger_path, ledger.take(step))
    keep_rows_until(run.ledger_path, 2)
    assert [row.step for row in read_ledger(run.ledger_path)] == [1, 1, 2, 2]


def measured(step: int, process: str, phase: str, *sizes: int) -> LedgerRow:
    held = Footprint(*sizes)
    return LedgerRow(step, phase, process, "node 0", None, held, held, Line(1, 9), 0.5)


def test_the_file_has_the_rows_in_which_a_maximum_moves(tmp_path: Path) -> None:
    """By more than 1 %, in any measure; each process and phase for itself."""
    file = LedgerFile(tmp_path / "ledger.jsonl")
    sizes = [(1000, 10, 20, 500), (1009, 10, 20, 504), (900, 11, 20, 505), (1011, 5, 5, 5)]
    for step, each in enumerate(sizes, start=1):
        file.add([measured(step, "rank 0", "score", *each)])
        file.add([measured(step, "rank 0", "sync", 10), measured(step, "rank 1", "score", 10)])
    rows = read_ledger(tmp_path / "ledger.jsonl")
    assert [(r.step, r.process, r.phase, r.measured.host) for r in rows] == [
        *((1, "rank 0", "score", 1000), (1, "rank 0", "sync", 10), (1, "rank 1", "score", 10)),
        (3, "rank 0", "score", 900),  # 11 is more than 10 allocated
        (4, "rank 0", "score", 1011),
    ]


def test_at_its_end_a_run_writes_maxima_exactly_with_their_steps(tmp_path: Path) -> None:
    file = LedgerFile(tmp_path / "ledger.jsonl")
    for step, each in enumerate([(1000, 1, 1, 500), (1005, 1, 1, 499), (1, 1, 1, 502)], start=1):
        file.add([measured(step, "rank 0", "score", *each)])
    file.add([measured(4, "rank 0", "score", 1, 1, 1, 1), measured(4, "rank 0", "sync", 7)])
    file.finish()
    file.finish()  # nothing is left
    *_, last = read_ledger(tmp_path / "ledger.jsonl")
    assert (last.step, last.at, last.phase) == (4, 3, "score")
    assert last.measured == Footprint(1005, 1, 1, 502)
    assert len(read_ledger(tmp_path / "ledger.jsonl")) == 3


def test_a_file_does_not_grow_with_steps(tmp_path: Path) -> None:
    file = LedgerFile(tmp_path / "ledger.jsonl")
    rng = np.random.default_rng(0)
    for step in range(1, 500):
        file.add([measured(step, "local", "score", int(10**9 * (1 + 0.005 * rng.random())))])
    file.finish()
    assert len(read_ledger(tmp_path / "ledger.jsonl")) <= 2


def test_leaks_come_back_from_their_file(tmp_path: Path) -> None:
    leak = Leak("rank 0", "rollout", "host", 1e6, 90)
    append_row(tmp_path / "leaks.jsonl", {"step": 160, **asdict(leak)})
    assert read_leaks(tmp_path / "leaks.jsonl") == [leak]
    assert read_leaks(tmp_path / "none.jsonl") == []
    for wrong in ({"process": "rank 0"}, asdict(leak) | {"rate": "x"}):
        (tmp_path / "leaks.jsonl").write_text(json.dumps({"step": 1, **wrong}) + "\n")
        with pytest.raises(ConfigError, match=r"leaks\.jsonl has a row that is no leak"):
            read_leaks(tmp_path / "leaks.jsonl")


def test_a_missing_ledger_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ledger\.jsonl is not there"):
        read_ledger(tmp_path / "ledger.jsonl")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "no JSON"),
        ('{"phase": "load"}', "no object with a whole number as `step`"),
        ('{"step": 1, "phase": "load"}', r".*\(KeyError\('process'\)\)"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    ledger = Ledger({}, 0)
    ledger.add("sync", {"local": on_host(9, 9)}, 1.0)
    path = tmp_path / "ledger.jsonl"
    write_ledger(RunDirectory(tmp_path).ledger_path, ledger.take(1))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(PlimsollError, match=rf"ledger\.jsonl, line 3: {why}"):
        read_ledger(path)


def test_the_use_of_a_step_is_the_largest_of_its_phases() -> None:
    ledger = Ledger({"local": {"score": Footprint(70), "load": Footprint(60)}}, 0)
    ledger.add("load", {"local": on_host(80, 9)}, 1.0)
    ledger.add("score", {"local": on_host(75, 9)}, 1.0)
    ledger.add("data", {"local": on_host(20, 9)}, 1.0)
    use = memory_use(ledger.take(1))
    assert use == {"local": MemoryUse(80, 70), "node 0": MemoryUse(80, 70)}
    ledger.add("score", {f"rank {n}": on_host(10 + n, 9) for n in range(3)}, 1.0)
    use = memory_use(ledger.take(2))
    assert use == {"rank 2": MemoryUse(12, None), "node 0": MemoryUse(33, None)}
    assert MemoryUse(1_900_000_000, 2_100_000_000).text == "1.9 GB (plan 2.1)"
    assert MemoryUse(42_000_000, None).text == "42 MB"


def test_shares_are_in_the_ranks_row_of_the_load_and_come_back(tmp_path: Path) -> None:
    share = DividedShare("actor", "weights", whole=100, ranks=2, held=50)
    reading = Reading(HostReading("a", 9, 8, 500, 1000), shares=(share,))
    ledger = Ledger({}, 0)
    for phase in ("load", "score"):
        ledger.add(phase, {"rank 0": reading}, 1.0)
    write_ledger(RunDirectory(tmp_path).ledger_path, ledger.take(1))
    rows = read_ledger(tmp_path / "ledger.jsonl")
    told = {(row.phase, row.process): row.shares for row in rows if row.shares}
    assert len(rows) == 4 and told == {("load", "rank 0"): (share,)}


def test_how_busy_cards_were_is_weighted_by_time_and_read_back(tmp_path: Path) -> None:
    """Phases that come twice in a step, and processes, count by their seconds."""

    def on_card(busy: float | None) -> Reading:
        return Reading(HostReading("a", 11, 10, 500, 1000), replace(CARD, busy=busy))

    ledger = Ledger({}, 0)
    ledger.add("rollout", {"rank 0": on_card(0.25), "engine 0": on_card(1.0)}, 3.0)
    ledger.add("rollout", {"rank 0": on_card(0.75), "engine 0": on_card(None)}, 1.0)
    ledger.add("sync", {"controller": on_host(6, 4)}, 9.0)
    rows = ledger.take(1)
    shares = {row.process: row.busy for row in rows if row.phase == "rollout"}
    # (0.25 x 3 + 0.75 x 1) / 4; of the second part of the engine nothing is known
    assert shares == {"rank 0": 0.375, "engine 0": 1.0, "node 0": None}
    assert busy_share(rows) == (0.375 * 4 + 1.0 * 4) / 8
    assert busy_share([row for row in rows if row.phase == "sync"]) is None
    path = tmp_path / "ledger.jsonl"
    write_ledger(path, rows)
    assert [row.busy for row in read_ledger(path)] == [row.busy for row in rows]
