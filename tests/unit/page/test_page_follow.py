"""Files that grow are read on from where they were left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.page.follow import FilePosition, read_on
from plimsoll.page.watched import Watched, read_whole_run, watch_runs
from plimsoll.run.directory import RunDirectory
from plimsoll.run.json_lines import append_row, write_rows


@pytest.fixture
def run(tmp_path: Path) -> Watched:
    (found,) = watch_runs([tmp_path])
    return found


def rewards(run: Watched) -> list[float]:
    return [float(value) for value in run.metrics.column("reward")]


def test_only_what_is_new_is_read(run: Watched) -> None:
    path = run.run.metrics_path
    append_row(path, {"step": 1, "reward": 0.5})
    first = run.look()
    append_row(path, {"step": 2, "reward": 1, "kl": 0.25})
    second = first.look()
    assert (rewards(first), rewards(second)) == ([0.5], [0.5, 1.0])
    np.testing.assert_equal(second.metrics.column("kl"), [np.nan, 0.25])
    assert second.metrics.place.offset == path.stat().st_size and second.unread == 0
    assert len({run.version, first.version, second.version}) == 3
    assert second.look().version == second.version


def test_a_line_that_is_half_written_waits_for_its_end(run: Watched) -> None:
    path = run.run.metrics_path
    append_row(path, {"step": 1, "reward": 0.5})
    with path.open("a") as file:
        file.write('{"step": 2, "rew')
    seen = run.look()
    assert rewards(seen) == [0.5] and seen.problem == ""
    with path.open("a") as file:
        file.write('ard": 1.0}\n')
    assert rewards(seen.look()) == [0.5, 1.0]


def test_a_file_that_was_written_anew_is_read_anew(run: Watched) -> None:
    """A run that goes on from a checkpoint drops later rows, in a file of its own."""
    path = run.run.metrics_path
    write_rows(path, [{"step": step, "reward": float(step)} for step in (1, 2, 3)])
    seen = run.look()
    write_rows(path, [{"step": 1, "reward": 1.0}, {"step": 2, "reward": 7.0}])
    assert rewards(seen.look()) == [1.0, 7.0]
    path.unlink()
    assert rewards(seen.look()) == []


def test_much_is_read_in_parts_of_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"step": step} for step in range(10)])  # of 12 bytes each
    place, read = FilePosition().update(path), []
    while more := read_on(path, place, most=30):
        rows, _, place = more
        read.append(rows["step"].to_pylist())
    assert read == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    one = read_on(path, FilePosition().update(path), most=3)
    assert one is not None and one[0]["step"].to_pylist() == [0]


def test_whole_reads_all_parts(run: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(run.run.metrics_path, [{"step": step, "reward": 1.0} for step in range(2000)])
    monkeypatch.setattr(Watched.look, "__defaults__", (1000,))
    assert len(run.look().metrics.rows) < 50
    assert len(read_whole_run(run).metrics.rows) == 2000


def test_a_broken_line_is_named_and_what_was_read_stays(run: Watched) -> None:
    path = run.run.metrics_path
    append_row(path, {"step": 1, "reward": 0.5})
    seen = run.look()
    with path.open("a") as file:
        file.write("nonsense\n")
    after = seen.look()
    assert rewards(after) == [0.5] and "metrics.jsonl, line 2: no JSON" in after.problem
    with pytest.raises(PlimsollError, match=r"metrics\.jsonl, line 2: no JSON"):
        read_whole_run(run)


def test_what_is_not_finite_is_kept_as_such(run: Watched) -> None:
    append_row(run.run.metrics_path, {"step": 1, "kl": float("nan"), "eval/loss": float("inf")})
    append_row(run.run.metrics_path, {"step": 2, "kl": 1.0})
    seen = run.look()
    np.testing.assert_equal(seen.metrics.column("kl"), [np.nan, 1.0])
    assert seen.metrics.evaluated == ({"step": 1, "eval/loss": None},)
    assert seen.metrics.last == {"step": 2, "kl": 1.0}


def test_runs_have_the_shortest_names_that_tell_them_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a/ppo", "b/ppo", "b/grpo")]
    for path in paths:
        path.mkdir(parents=True)
    names = [[one.name for one in watch_runs(some)] for some in (paths[:1], paths[1:], paths)]
    assert names == [["ppo"], ["ppo", "grpo"], ["a/ppo", "b/ppo", "b/grpo"]]
    assert [one.name for one in watch_runs(paths[:1] * 2)] == ["ppo (1)", "ppo (2)"]
    with pytest.raises(ConfigError, match="gone is no directory"):
        watch_runs([tmp_path / "gone"])


def test_a_run_that_has_written_nothing_is_empty(run: Watched) -> None:
    seen = run.look()
    assert (seen.metrics.names, seen.settings, seen.job, seen.now) == ({}, {}, None, None)
    assert RunDirectory(run.run.path) == seen.run and seen.ledger.rows == []
