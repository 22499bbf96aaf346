from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import PlimsollError
from plimsoll.run.json_lines import append_row, document, keep_rows_until, read_rows, row_line

plain = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)


@given(st.dictionaries(st.text(), plain | st.lists(plain)))
def test_a_row_is_one_line_of_strict_json(row: dict[str, Any]) -> None:
    line = row_line(row)
    assert line.count("\n") == 1 and line.endswith("\n")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(line, parse_constant=refuse)
    assert found.keys() == row.keys()


def test_numbers_that_json_lacks_become_null() -> None:
    line = row_line({"step": 1, "loss": math.nan, "all": {"x": [math.inf, 2.0]}})
    assert json.loads(line) == {"step": 1, "loss": None, "all": {"x": [None, 2.0]}}
    assert document({"é": math.nan}) == '{\n  "é": null\n}\n'


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_last_line_is_left_out_wherever_it_was_torn(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    append_row(path, {"step": 1})
    append_row(path, {"step": 2})
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_rows(path) == [{"step": 1}]
    keep_rows_until(path, 5)
    append_row(path, {"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_full_disk_leaves_the_rows_that_were_there(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: half of the second row can be written."""
    path = tmp_path / "metrics.jsonl"
    append_row(path, {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (18, limits[1]))
    try:
        with pytest.raises(PlimsollError, match=r"metrics\.jsonl: .*What it had is whole"):
            append_row(path, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == '{"step": 1}\n'


def test_a_character_torn_in_its_middle_is_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_row(path, {"step": 1})
    path.write_bytes(path.read_bytes() + '{"step": 2, "x": "ü'.encode()[:-1])
    assert read_rows(path) == [{"step": 1}]


def test_rows_after_the_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(1, 6):
        append_row(path, {"step": step})
    keep_rows_until(path, 3)
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]


def test_only_rows_that_are_dropped_are_read(tmp_path: Path) -> None:
    """A ledger may have millions of rows."""
    path = tmp_path / "ledger.jsonl"
    path.write_text('{broken\n{"step": 1}\n{"step": 2}\n{"step": 2}\n{"st')
    keep_rows_until(path, 1)
    assert path.read_text() == '{broken\n{"step": 1}\n'
    keep_rows_until(path, 1)
    with pytest.raises(PlimsollError, match=r"ledger\.jsonl, byte 1: no JSON"):
        keep_rows_until(path, 0)
    path.write_text("")
    keep_rows_until(path, 0)
    assert path.read_text() == ""


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"loss": 1}', ""])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 2}\n')
    with pytest.raises(PlimsollError, match=r"metrics\.jsonl, line 2"):
        read_rows(path)
