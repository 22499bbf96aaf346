"""The end of a run's log."""

from __future__ import annotations

from pathlib import Path

from plimsoll.page.progress import console, log_bytes
from plimsoll.page.watched import watch_runs


def test_a_run_without_a_log_has_none(tmp_path: Path) -> None:
    (run,) = watch_runs([tmp_path])
    assert log_bytes(run) is None
    assert console(run) == {"bytes": None, "cut": False, "lines": []}


def test_a_short_log_is_shown_whole_with_the_line_under_way(tmp_path: Path) -> None:
    (run,) = watch_runs([tmp_path])
    log = tmp_path / "run.log"
    log.write_bytes(b"one\r\n\nred \x1b[31m\xff\nunder w")
    assert console(run) == {
        "bytes": log_bytes(run),
        "cut": False,
        "lines": ["one", "", "red \x1b[31m�", "under w"],
    }
    log.write_text("")
    assert console(run)["lines"] == []


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    (run,) = watch_runs([tmp_path])
    (tmp_path / "run.log").write_text("".join(f"line {i}\n" for i in range(301)))
    found = console(run)
    assert (len(found["lines"]), found["lines"][0], found["cut"]) == (300, "line 1", True)
    (tmp_path / "run.log").write_text("ä" * 10**6 + "\n" + "last\n")
    assert console(run)["lines"] == ["last"]
