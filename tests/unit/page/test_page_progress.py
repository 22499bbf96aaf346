"""Where a run is: its state, its time left, its warnings."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from plimsoll.page.progress import progress, seconds
from plimsoll.page.watched import Watched, watch_runs
from plimsoll.run.directory import RunDirectory
from plimsoll.run.json_lines import append_row
from plimsoll.run.phases import CurrentPhase, read_current_phase, write_current_phase


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path)
    found.write_config("# grpo\nrun: {steps: 10}\nactor: {model: {path: one}}\n")
    return found


def shown(run: RunDirectory, at: float | None = None) -> dict[str, Any]:
    (seen,) = watch_runs([run.path])
    return progress(seen.look(), at)


def test_the_time_left_is_that_of_the_steps_so_far(run: RunDirectory) -> None:
    """(2 + 1) and (4 + 1) seconds a step, so eight steps take 32; loading is done once."""
    append_row(run.metrics_path, {"step": 0, "seconds/eval": 50.0, "seconds/load": 20.0})
    append_row(run.metrics_path, {"step": 1, "seconds/rollout": 2.0, "seconds/sync": 1.0})
    append_row(run.metrics_path, {"step": 2, "seconds/rollout": 4.0, "seconds/sync": 1.0})
    write_current_phase(run.now_path, CurrentPhase(3, 10, "rollout", since=100.0))
    found = shown(run, at=107.0)
    assert (found["step"], found["steps"], found["state"]) == (2, 10, "running")
    assert (found["phase"], found["phaseSeconds"]) == ("rollout", 7.0)
    assert (found["secondsPerStep"], found["secondsLeft"], found["seconds"]) == (4.0, 32.0, 78.0)
    assert (found["job"], found["model"]) == ("grpo", "one")


def test_how_a_run_came_to_an_end_is_told(run: RunDirectory) -> None:
    assert shown(run)["state"] == "stopped"
    run.end_path.write_text(json.dumps({"how": "failed", "why": "no disk", "at": 1.0}))
    assert shown(run)["state"] == "failed: no disk"
    run.end_path.write_text(json.dumps({"how": "stopped", "why": "as asked", "at": 1.0}))
    assert shown(run)["state"] == "stopped"
    run.end_path.write_text(json.dumps({"how": "done", "why": "", "at": 1.0}))
    assert shown(run)["state"] == "done"  # of `plimsoll sample`, which has no model
    run.end_path.unlink()  # an older version wrote none
    run.model_path.mkdir()
    assert shown(run)["state"] == "done"
    run.out_of_memory_path.write_text("why")
    assert shown(run)["state"] == "out of memory"
    write_current_phase(run.now_path, CurrentPhase(3, 10, "sync"))
    assert shown(run)["state"] == "running"
    assert shown(run)["secondsLeft"] is None  # before the first step


def test_a_run_that_writes_no_model_is_done_after_its_last_step(run: RunDirectory) -> None:
    run.write_config("# grpo\nrun: {steps: 2, save_model: false}\n")
    append_row(run.metrics_path, {"step": 1})
    assert shown(run)["state"] == "stopped"
    append_row(run.metrics_path, {"step": 2})
    assert shown(run)["state"] == "done"


def test_what_was_only_sampled_is_done_with_its_selection(run: RunDirectory) -> None:
    run.write_config("# sample\nrun: {steps: 2}\n")
    append_row(run.metrics_path, {"step": 2})
    assert shown(run)["state"] == "stopped"
    run.best_path.write_text("")
    assert shown(run)["state"] == "done"


def test_a_killed_run_does_not_go_on_but_one_elsewhere_may(run: RunDirectory) -> None:
    gone = 2**22 + 1  # above the largest number that Linux gives a process
    write_current_phase(run.now_path, CurrentPhase(3, 10, "sync", pid=gone))
    append_row(run.metrics_path, {"step": 2})
    assert shown(run)["state"] == "killed" and shown(run)["phase"] is None
    assert shown(run)["goOn"].startswith("No checkpoint was saved")
    checkpoint = run.checkpoint_path(2)
    checkpoint.mkdir(parents=True)
    go_on = str(shown(run)["goOn"])
    assert go_on.startswith(f"Saved: {checkpoint}. ") and go_on.endswith("--run.resume auto")
    write_current_phase(run.now_path, CurrentPhase(3, 10, "sync", pid=gone, host="another"))
    assert shown(run)["state"] == "running" and shown(run)["goOn"] == ""


def test_now_is_read_back_and_what_is_none_is_no_error(run: RunDirectory) -> None:
    assert read_current_phase(run.now_path) is None
    now = CurrentPhase(1, 2, "load", 3.0)
    assert (now.host, now.pid) == (socket.gethostname(), os.getpid())
    write_current_phase(run.now_path, now)
    assert read_current_phase(run.now_path) == now
    assert [one.name for one in run.path.iterdir()].count("now.json") == 1
    run.now_path.write_text('{"step"')
    assert read_current_phase(run.now_path) is None
    write_current_phase(run.path / "gone" / "now.json", now)  # a full disk, or none, is no error


def test_what_is_not_healthy_is_told_with_what_to_try(run: RunDirectory) -> None:
    append_row(run.metrics_path, {"step": 1, "entropy": 9.0, "kl": float("nan"), "truncated": 0.1})
    kl, entropy = shown(run)["warnings"]
    assert kl["text"].startswith("kl is nan (the KL of the actor")
    assert entropy["metric"] == "entropy" and "healthy is 0.01 to 4" in entropy["text"]
    assert entropy["attempt"].startswith("a lower learning rate")


def test_seconds_are_told_by_phase(run: RunDirectory) -> None:
    append_row(run.metrics_path, {"step": 1, "seconds/load": 3.0, "seconds/rollout": 2.0})
    append_row(run.metrics_path, {"step": 2, "seconds/rollout": 2.5, "seconds/save": 1.0})
    (seen,) = watch_runs([run.path])
    assert isinstance(seen, Watched)
    assert seconds(seen.look()) == {"before": {"load": 3.0}, "steps": {"rollout": 4.5, "save": 1.0}}


def test_the_last_evaluation_stays_with_its_step(run: RunDirectory) -> None:
    assert shown(run)["heldOut"] is None
    interval = {"eval/reward_low": 0.25, "eval/reward_high": 0.75}
    append_row(run.metrics_path, {"step": 2, "reward": 1.0, "eval/reward": 0.5, **interval})
    append_row(run.metrics_path, {"step": 3, "reward": 0.75})
    found = shown(run)
    assert found["headline"] == {"reward": "0.75"}
    assert found["heldOut"] == {"step": 2, "figures": {"reward": "0.5 (0.25 to 0.75)"}}


def test_speed_is_a_mean_of_steps_and_cards_have_theirs(run: RunDirectory) -> None:
    append_row(run.metrics_path, {"step": 0, "tokens_per_second": 0.0})
    append_row(run.metrics_path, {"step": 1, "tokens_per_second": 100.0})
    append_row(run.metrics_path, {"step": 2, "tokens_per_second": 300.0, "mfu": 0.25})
    assert shown(run)["speed"] == {"tokens_per_second": 200.0, "mfu": 0.25, "gpu_busy": None}
