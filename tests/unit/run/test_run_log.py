"""The log of a run: lines with the time, rotated, and fed by the standard streams."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import cast

import pytest

from plimsoll.run.output import RunLog, Tee, console_to

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def texts(path: Path) -> list[str]:
    """The lines, each of which must have its time."""
    lines = path.read_text().splitlines()
    assert all(re.match(TIME, line) for line in lines)
    return [line[20:] for line in lines]


def test_lines_have_the_time_and_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    RunLog(path).add("one\ntwo\n")
    RunLog(path).add("\x1b[1;31mred\x1b[0m\x1b[2K, \ud800")  # a run that is resumed
    assert texts(path) == ["one", "two", "red, \\ud800"]


def test_a_full_file_is_put_aside_and_the_one_before_it_dropped(tmp_path: Path) -> None:
    """A line of four characters has 25 bytes with time and ends; four of them are 100."""
    log = RunLog(tmp_path / "run.log", most_bytes=100)
    for number in range(1, 11):
        log.add(f"n{number:03}")
    assert texts(tmp_path / "run.log") == ["n009", "n010"]
    assert texts(tmp_path / "run-older.log") == ["n005", "n006", "n007", "n008"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_log_that_cannot_be_written_is_reported_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path / "gone" / "run.log")
    log.add("one")
    log.add("two")
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}/gone/run.log ") and "(No such file or directory)" in line


def test_a_closed_log_takes_nothing(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run.log")
    log.close()
    log.add("late")
    assert not (tmp_path / "run.log").exists()


def test_whole_lines_go_to_the_function_and_all_to_the_stream() -> None:
    stream, lines = io.StringIO(), list[str]()
    tee = Tee(stream, lines.append)
    for text in ("a", "b\nc", "\n", "10%\r", "50%\r", "100%\nend\r\n", "rest"):
        assert tee.write(text) == len(text)
    assert lines == ["ab", "c", "100%", "end"]
    assert stream.getvalue() == "ab\nc\n10%\r50%\r100%\nend\r\nrest"
    assert tee.isatty() is False and tee.getvalue() == stream.getvalue()


def test_what_is_printed_goes_to_the_log_inside_the_block_alone(tmp_path: Path) -> None:
    out, err, path = io.StringIO(), io.StringIO(), tmp_path / "run.log"
    before = (sys.stdout, sys.stderr)
    with console_to(RunLog(path), out, err):
        print("said")
        print("warned", file=sys.stderr)
        kept = sys.stderr
    assert (sys.stdout, sys.stderr) == before
    assert texts(path) == ["said", "warned"]
    assert (out.getvalue(), err.getvalue()) == ("said\n", "warned\n")
    assert cast(Tee, kept).write("later\n") == 6  # a logger may have kept it
