"""Checkpoints that are written while the run trains on: the same run, the same files; and what is
left if it is killed, stopped or fails amid one.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from commands import PPO, SFT, Outcome, metrics, run, run_here, wait_for, write_config, write_task
from safetensors import safe_open
from test_run_full_disk import files_of_at_most

from plimsoll.errors import PlimsollError
from plimsoll.run.json_lines import read_rows
from plimsoll.run.state import SavedFile, find_damage
from plimsoll.train.update import update
from plimsoll.trainer import checkpoint
from plimsoll.trainer.checkpoint import CheckpointFile

Write = Callable[[Iterable[CheckpointFile], Path], tuple[SavedFile, ...]]

KILLED_AMID = """
import fnmatch, os, signal, sys


def kill(event, values):
    if event == "open" and fnmatch.fnmatch(str(values[0]), os.environ["KILLED_AMID"]):
        os.kill(os.getpid(), signal.SIGKILL)


if "KILLED_AMID" in os.environ:
    sys.addaudithook(kill)
"""
"""A process that imports it is killed when it flushes a file with a path like this."""

IN_BACKGROUND = ("--run.save_in_background", "true")


def config(job: dict[str, Any]) -> dict[str, Any]:
    settings = copy.deepcopy(job)
    settings["run"] = {"directory": "whole", "steps": 6, "save_every": 2, "keep_checkpoints": 3}
    settings["run"] |= {"tensorboard": False}
    return settings


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("background")
    write_task(home)
    write_config(home, "sft", config(SFT))
    write_config(home, "ppo", config(PPO))
    divided = {"where": "ray", "ranks": 2, "threads": 1}
    write_config(home, "ray", config(SFT) | {"cluster": divided})
    (home / "sitecustomize.py").write_text(KILLED_AMID)
    return home


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """The run of sft.yaml that writes its checkpoints at once."""
    assert run_here(home, "sft", "sft.yaml").code == 0
    return home / "whole"


def go(home: Path, directory: str, *words: str) -> Outcome:
    return run_here(home, "sft", "sft.yaml", "--run.directory", directory, *IN_BACKGROUND, *words)


def checkpoints(run: Path) -> dict[str, dict[str, Any]]:
    """Return what each checkpoint holds, by file; the checksums of tensors."""
    contents: dict[str, dict[str, Any]] = {}
    for path in (run / "checkpoints").iterdir():
        assert find_damage(path) == ""
        listed = json.loads((path / "manifest.json").read_text())
        contents[path.name] = {name: _content(path / name) for name in listed}
        contents[path.name].pop("state.json")  # it has the clock's seconds
    return contents


def _content(path: Path) -> object:
    if path.suffix != ".safetensors":
        return path.read_text()
    with safe_open(path, "pt") as file:
        return file.metadata()


def assert_same(run: Path, plain: Path) -> None:
    assert metrics(run) == metrics(plain)
    assert checkpoints(run) == checkpoints(plain)
    files = [path / "model" / "model.safetensors" for path in (run, plain)]
    assert files[0].read_bytes() == files[1].read_bytes()


def slow_writes(monkeypatch: pytest.MonkeyPatch, before: Callable[[Path], None]) -> None:
    """Call a function with the directory before a rank writes what it has copied."""

    def write(files: Iterable[CheckpointFile], directory: Path) -> tuple[SavedFile, ...]:
        before(directory)
        return checkpoint.write_files(files, directory)

    monkeypatch.setattr("plimsoll.trainer.worker.write_files", write)


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return max((row["step"] for row in read_rows(path)), default=0) if path.is_file() else 0


def step_of(directory: Path) -> int:
    return int(directory.parent.name.removeprefix(".step-").partition(".")[0])


def test_training_goes_on_while_a_copy_is_written(
    home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy but the last waits for the next step, whose weights must not be in it."""
    waited = []

    def wait_for_next_step(directory: Path) -> None:
        step = step_of(directory)
        if step < 6:
            wait_for(lambda: steps_done(home / "slow") > step, "a step during a save")
            waited.append(step)

    slow_writes(monkeypatch, wait_for_next_step)
    assert go(home, "slow").code == 0
    assert waited == [2, 4]
    assert_same(home / "slow", whole)


@pytest.mark.slow
def test_actor_and_critic_are_saved_in_the_background(home: Path) -> None:
    for name, flags in (("ppo", ()), ("ppo_background", IN_BACKGROUND)):
        done = run_here(home, "ppo", "ppo.yaml", "--run.directory", name, *flags)
        assert done.code == 0, done.err
    assert_same(home / "ppo_background", home / "ppo")


@pytest.mark.slow
def test_a_run_that_is_killed_amid_a_save_goes_on_from_the_one_before(
    home: Path, whole: Path
) -> None:
    words = ("sft", "sft.yaml", "--run.directory", "killed", *IN_BACKGROUND)
    amid = {"KILLED_AMID": "*/.step-000004.partial-*/actor/rank-*"}
    ended = run(home, *words, environment=amid)
    assert ended.code == -signal.SIGKILL, ended.err
    again = run_here(home, *words, "--run.resume", "auto")
    assert again.code == 0 and "resumed after step 2 " in again.out
    assert_same(home / "killed", whole)
    assert not list((home / "killed" / "checkpoints").glob(".*"))


def test_the_error_of_a_copy_ends_the_run_and_the_one_before_stays(home: Path, whole: Path) -> None:
    assert go(home, "torn", "--run.steps", "2").code == 0
    largest = max(file.stat().st_size for file in (home / "torn").rglob("rank-*"))
    with files_of_at_most(largest // 2):
        full = go(home, "torn", "--run.resume", "auto")
    assert full.code == 1 and "Cannot write" in full.err and "Traceback" not in full.err
    assert [path.name for path in (home / "torn" / "checkpoints").iterdir()] == ["step-000002"]


def test_ctrl_c_waits_for_the_copy(
    home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(directory: Path) -> None:
        if step_of(directory) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    slow_writes(monkeypatch, interrupt)
    stopped = go(home, "stopped")
    assert stopped.code == 130 and "everything is saved" in stopped.err
    found, expected = checkpoints(home / "stopped"), checkpoints(whole)
    assert found["step-000002"] == expected["step-000002"]
    assert go(home, "stopped", "--run.resume", "auto").code == 0
    assert metrics(home / "stopped") == metrics(whole)


def test_a_run_that_fails_after_a_copy_keeps_it(
    home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is written only when the error is on its way."""
    failed = []

    def fail_in_step_3(*arguments: Any) -> Any:
        if steps_done(home / "failed") == 2:
            failed.append(True)
            raise PlimsollError("step 3 went wrong")
        return update(*arguments)

    monkeypatch.setattr("plimsoll.train.from_data.update", fail_in_step_3)
    slow_writes(monkeypatch, lambda directory: wait_for(lambda: failed, "the error"))
    ended = go(home, "failed")
    assert ended.code == 1 and "step 3 went wrong" in ended.err
    assert "go on after step 2" in ended.err
    monkeypatch.undo()
    assert go(home, "failed", "--run.resume", "auto").code == 0
    assert_same(home / "failed", whole)


@pytest.mark.parametrize("flags", [(), IN_BACKGROUND], ids=["at once", "in the background"])
def test_files_that_only_ranks_see_are_no_checkpoint(
    flags: tuple[str, ...], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes with disks of their own leave such files."""

    def write(files: Iterable[CheckpointFile], directory: Path) -> tuple[SavedFile, ...]:
        written = checkpoint.write_files(files, directory)
        (directory / written[-1].name).unlink()
        return written

    monkeypatch.setattr("plimsoll.trainer.worker.write_files", write)
    directory = f"unseen-{len(flags)}"
    ended = run_here(home, "sft", "sft.yaml", "--run.directory", directory, *flags)
    assert ended.code == 1 and "Traceback" not in ended.err
    assert "step 2 is not whole: actor/rank-00000" in ended.err
    assert "a disk that all nodes see" in ended.err
    assert not list((home / directory / "checkpoints").iterdir())


@pytest.mark.engine
@pytest.mark.slow
def test_two_ranks_save_in_the_background(home: Path) -> None:
    for name, flags in (("ray", ()), ("ray_background", IN_BACKGROUND)):
        done = run(home, "sft", "ray.yaml", "--run.directory", name, *flags)
        assert done.code == 0, done.err
    assert_same(home / "ray_background", home / "ray")
