"""The report of a run directory: its text, its page, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.recipes.report import report_run, table_text
from plimsoll.run.comparison import Comparison
from plimsoll.run.directory import RunDirectory
from plimsoll.run.ledger import LedgerRow, ledger_values
from plimsoll.run.readings import Footprint, Line

GB = 10**9


def row(step: int, phase: str, process: str, measured: int, predicted: int | None) -> LedgerRow:
    held = Footprint(measured)
    return LedgerRow(
        step=step,
        phase=phase,
        process=process,
        rank=None,
        node="node 0",
        predicted=None if predicted is None else Footprint(predicted),
        measured=held,
        held=held,
        line=Line(6 * GB, 10 * GB),
        seconds=1.25,
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    rows = [
        row(1, "load", "rank 0", 2 * GB, None),
        row(1, "train_actor", "rank 0", 3 * GB, 4 * GB),
        row(1, "train_actor", "node 0", 3 * GB, 4 * GB),
        row(2, "train_actor", "rank 0", 5 * GB, 4 * GB),
        row(2, "train_actor", "node 0", 5 * GB, 4 * GB),
    ]
    run.append_ledger(map(ledger_values, rows))
    return run


def test_the_text_has_a_line_a_phase_and_names_what_is_nearest(run: RunDirectory) -> None:
    lines = report_run(run.path).splitlines()
    assert lines[:4] == [
        "process        phase         memory    predicted  measured    over   seconds",
        "rank 0         load          host                     2 GB               1.2",
        "rank 0         train_actor   host           4 GB      5 GB    +25%       2.5",
        "node 0         train_actor   host           4 GB      5 GB    +25%       2.5",
    ]
    assert lines[5] == (
        "Nearest the line: rank 0 in train_actor, step 2. The run held 5 GB of its node's 10 GB "
        "(50%); 6 GB were in use by all that ran there."
    )
    assert lines[6] == f"Written to {run.report_path}."


def test_the_table_keeps_to_80_columns() -> None:
    wide = Comparison("critic rank 127", "train_critic", "allocated", 99 * GB, 999 * GB, 123456.7)
    assert max(map(len, table_text([wide]).splitlines())) <= 80


def test_the_page_is_well_formed_needs_nothing_and_escapes(run: RunDirectory) -> None:
    run.write_config("actor: <b>&</b>\n")
    run.append_metrics({"step": 1, "loss": 2.0, "seconds/train_actor": 1.0})
    run.write_plan("{}", "<svg/>")
    report_run(run.path)
    page = run.report_path.read_text()
    body = re.search(r"<body>.*</body>", page, re.S)
    assert body is not None
    text = body[0].replace("&nbsp;", " ")
    tree = ElementTree.fromstring(re.sub(r"(<img [^>]*)>", r"\1/>", text))
    assert [cell.text for cell in tree.findall(".//tr[3]/td")] == [
        *("rank 0", "train_actor", "host", "4 GB", "5 GB", "+25%", "2.5")
    ]
    pictures = [image.get("src", "") for image in tree.findall(".//img")]
    assert [picture.partition(";")[0] for picture in pictures] == [
        "data:image/png",
        "data:image/svg+xml",
    ]
    assert [pre.text for pre in tree.findall(".//pre")] == ["actor: <b>&</b>\n"]


def test_a_run_without_metrics_or_plan_is_reported_too(run: RunDirectory) -> None:
    report_run(run.path)
    assert "<img" not in run.report_path.read_text()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone is no directory"):
        report_run(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"ledger\.jsonl is not there"):
        report_run(tmp_path)
    (tmp_path / "ledger.jsonl").touch()
    with pytest.raises(ConfigError, match=r"ledger\.jsonl has no rows yet"):
        report_run(tmp_path)


def test_a_broken_line_leaves_the_old_report(run: RunDirectory) -> None:
    report_run(run.path)
    before = run.report_path.read_bytes()
    with run.ledger_path.open("a") as file:
        file.write('{"step": 3}\n')
    with pytest.raises(PlimsollError, match=r"ledger\.jsonl, line 6: no row of a ledger"):
        report_run(run.path)
    assert run.report_path.read_bytes() == before
