"""The ledger in short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.page.ledger import (
    Comparison,
    compare,
    drop_lone_nodes,
    fullest_of_kinds,
    nearest_to_line,
)
from plimsoll.run.ledger import LedgerRow
from plimsoll.run.readings import Footprint, Line

LINE = Line(9, 100)


def row(
    step: int,
    phase: str,
    process: str,
    measured: Footprint,
    predicted: Footprint | None = None,
    line: Line = LINE,
) -> LedgerRow:
    return LedgerRow(step, phase, process, "node 0", predicted, measured, measured, line, 0.5)


def test_each_number_is_the_largest_of_all_steps_beside_its_prediction() -> None:
    rows = [
        row(1, "load", "rank 0", Footprint(8, 20, 30, 40), Footprint(10, 25, 25, 50)),
        row(1, "load", "node 0", Footprint(8), Footprint(10)),
        row(2, "score", "rank 0", Footprint(5)),
        row(2, "load", "rank 0", Footprint(9, 10, 35, 40), Footprint(10, 25, 25, 50)),
    ]
    assert compare(rows) == [
        Comparison("rank 0", "load", "host", 10, 9, 1.0),
        Comparison("rank 0", "load", "allocated", 25, 20, 1.0),
        Comparison("rank 0", "load", "reserved", 25, 35, 1.0),
        Comparison("rank 0", "load", "device", 50, 40, 1.0),
        Comparison("rank 0", "score", "host", None, 5, 0.5),
        Comparison("node 0", "load", "host", 10, 8, 0.5),
    ]
    over = [one.over for one in compare(rows)]
    assert over[:4] == [pytest.approx(x) for x in (-0.1, -0.2, 0.4, -0.2)]
    assert over[4] is None


def test_nearest_the_line_of_a_node_is_its_largest_process_in_that_phase() -> None:
    """Others may fill the node at another time: that is not the run's."""
    rows = [
        row(1, "load", "rank 0", Footprint(30), line=Line(99, 100)),
        row(1, "load", "node 0", Footprint(30), line=Line(99, 100)),
        row(2, "score", "rank 0", Footprint(20)),
        row(2, "score", "rank 1", Footprint(25)),
        row(2, "score", "node 0", Footprint(45), line=Line(60, 100)),
    ]
    assert nearest_to_line(rows) == (rows[3], rows[4])


def test_nearest_the_line_of_a_card_counts_all_that_it_shows() -> None:
    rows = [
        row(1, "score", "rank 0", Footprint(60, 10, 20, 30), line=Line(30, 40)),
        row(1, "score", "rank 1", Footprint(60, 10, 20, 25), line=Line(25, 40)),
        row(1, "score", "node 0", Footprint(120), line=Line(130, 1000)),
    ]
    assert nearest_to_line(rows) == (rows[0], rows[0])


def test_a_node_of_one_process_is_not_told_twice() -> None:
    rows = [
        row(1, "load", "rank 0", Footprint(8)),
        row(1, "load", "node 0", Footprint(8)),
        replace(row(1, "load", "engine 0", Footprint(5)), node="node 1"),
        replace(row(1, "load", "rank 1", Footprint(9)), node="node 1"),
        replace(row(1, "load", "node 1", Footprint(14)), node="node 1"),
    ]
    assert drop_lone_nodes(rows) == [rows[0], *rows[2:]]


def test_of_a_kind_the_fullest_is_shown_phase_by_phase() -> None:
    """On a card, whatever the host holds: each with all numbers of the same process."""
    rows = [
        row(1, "load", "critic rank 0", Footprint(9, 1, 2, 30), Footprint(9, 1, 1, 20)),
        row(1, "load", "critic rank 11", Footprint(7, 1, 2, 40), Footprint(8, 2, 2, 40)),
        row(1, "load", "rank 0", Footprint(7, 1, 2, 50)),
        row(1, "score", "critic rank 0", Footprint(9)),
        row(1, "score", "critic rank 11", Footprint(8)),
    ]
    shown = fullest_of_kinds(compare(rows))
    assert [(one.process, one.phase, one.measure, one.measured) for one in shown] == [
        ("critic rank 11", "load", "host", 7),
        ("critic rank 11", "load", "allocated", 1),
        ("critic rank 11", "load", "reserved", 2),
        ("critic rank 11", "load", "device", 40),
        ("critic rank 0", "score", "host", 9),
        ("rank 0", "load", "host", 7),
        ("rank 0", "load", "allocated", 1),
        ("rank 0", "load", "reserved", 2),
        ("rank 0", "load", "device", 50),
    ]
    assert shown[0].predicted == 8
