"""What a start waits for, and how long the last one of its kind took."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest

from plimsoll.cluster import start_times
from plimsoll.cluster.start_times import (
    read_times,
    telling_of_start,
    times_path,
    waiting_text,
    write_time,
)


def test_the_last_time_of_each_kind_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "times.json"
    assert read_times(path) == {}
    write_time(path, "a", 12.34)
    write_time(path, "b", 5)
    write_time(path, "a", 20)
    assert [*read_times(path).items()] == [("b", 5), ("a", 20)]


def test_old_kinds_make_room(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    for kind in range(102):
        write_time(path, str(kind), 1)
    assert [*read_times(path)] == [str(kind) for kind in range(2, 102)]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": "long"}'])
def test_a_file_that_is_broken_is_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    assert read_times(path) == {}
    write_time(path, "a", 1)
    assert read_times(path) == {"a": 1}


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_time(tmp_path / "file" / "times.json", "a", 1)


def test_a_long_start_tells_once_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_time(times_path(), "vllm", 28)
    told, lines = Event(), list[str]()

    def note(line: str) -> None:
        lines.append(line)
        told.set()

    monkeypatch.setattr(start_times, "_SLOW_SECONDS", 0.0)
    with telling_of_start("vllm", lambda: ["rollout engine 0"], note):
        assert told.wait(60)
    assert lines == [
        "waiting for rollout engine 0 to start, for 0 s now; the last start of this kind took 28 s"
    ]
    assert waiting_text(["a", "b"], 30, {}, "vllm") == "waiting for a, b to start, for 30 s now"
