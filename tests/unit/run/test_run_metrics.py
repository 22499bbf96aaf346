from __future__ import annotations

import io
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from plimsoll.errors import PlimsollError
from plimsoll.run.directory import RunDirectory
from plimsoll.run.displays import StepReport
from plimsoll.run.json_lines import read_rows
from plimsoll.run.ledger import Ledger, MemoryUse
from plimsoll.run.loggers import Loggers, TensorBoardLogger
from plimsoll.run.progress import MetricsSink, Progress, scalars_of
from plimsoll.run.readings import HostReading, Reading

USE = {"rank 0": MemoryUse(64, 60)}


def report(step: int) -> StepReport:
    return StepReport(step, {"reward": step / 4}, 100, {"rollout": 1.5, "sync": 0.5}, USE)


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory)).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_one_write_reaches_file_tensorboard_and_display(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    stream = io.StringIO()
    with Progress("ppo", 2, tmp_path, stream) as progress:
        sink = MetricsSink(run, progress, Loggers([TensorBoardLogger(run.tensorboard_path)]))
        sink.write(report(1))
        sink.write(report(2))
    assert read_rows(run.metrics_path)[1] == {
        "step": 2,
        "reward": 0.5,
        "tokens": 100.0,
        "tokens_per_second": 50.0,
        "seconds/rollout": 1.5,
        "seconds/sync": 0.5,
        "memory_bytes/rank": 64.0,
    }
    assert scalars(run.tensorboard_path, "reward") == [(1, 0.25), (2, 0.5)]
    assert scalars(run.tensorboard_path, "seconds/sync") == [(1, 0.5), (2, 0.5)]
    assert stream.getvalue().count("ppo step") == 2


def test_what_only_cards_have_is_a_metric_where_it_is_known() -> None:
    on_cards = replace(report(1), tokens_at_peak=200.0, gpu_busy=0.5)
    found = scalars_of(on_cards)
    assert (found["mfu"], found["gpu_busy"]) == (0.25, 0.5)
    assert not {"mfu", "gpu_busy"} & scalars_of(report(1)).keys()


def test_the_ledger_reaches_file_and_tensorboard(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    ledger = Ledger({}, 0)
    with Progress("ppo", 2, tmp_path, io.StringIO()) as progress:
        sink = MetricsSink(run, progress, Loggers([TensorBoardLogger(run.tensorboard_path)]))
        for step, peak in ((1, 30), (2, 40)):
            ledger.add("score", {"rank 0": Reading(HostReading("a", peak, 9, 50, 100))}, 1.0)
            sink.write_ledger(ledger.take(step))
        sink.write_ledger([])
    assert [row["process"] for row in read_rows(run.ledger_path)] == ["rank 0", "node 0"] * 2
    assert scalars(run.tensorboard_path, "memory/rank/score") == [(1, 30.0), (2, 40.0)]


def test_a_metric_cannot_take_the_place_of_a_measure() -> None:
    with pytest.raises(AssertionError, match=r"\['step', 'tokens'\]"):
        scalars_of(StepReport(1, {"tokens": 1.0, "step": 1.0}, 5, {}, {}))


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    for first, value in ((1, 1.0), (3, 2.0)):
        writer = TensorBoardLogger(tmp_path, first_step=first)
        for step in range(first, 5):
            writer.scalars(step, {"loss": value})
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_tensorboard_shows_each_step_once_where_the_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first, now in ((0, 1_700_000_000.0), (3, 1_600_000_000.0), (2, 1_600_000_000.0)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        writer = TensorBoardLogger(tmp_path, first_step=first)
        for step in range(first, 5):
            writer.scalars(step, {"loss": first})
    monkeypatch.undo()
    assert scalars(tmp_path, "loss") == [(0, 0), (1, 0), (2, 2), (3, 2), (4, 2)]


def test_tensorboard_keeps_what_it_had_where_the_disk_is_full(tmp_path: Path) -> None:
    """A limit on the size of files stands for it."""
    writer = TensorBoardLogger(tmp_path)
    writer.scalars(1, {"loss": 1.0})
    size = next(tmp_path.iterdir()).stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8, limits[1]))
    try:
        with pytest.raises(PlimsollError, match=r"tfevents.* disk space"):
            writer.scalars(2, {"loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.scalars(3, {"loss": 3.0})
    assert scalars(tmp_path, "loss") == [(1, 1.0), (3, 3.0)]


def test_the_whole_room_needs_no_torch() -> None:
    program = """
import sys
import plimsoll.run.ending, plimsoll.run.progress
import plimsoll.run.state, plimsoll.run.phases, plimsoll.reward.score
from plimsoll.run.loggers import open_loggers
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
