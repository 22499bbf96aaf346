"""Runs that are killed while they write: what goes on from there is the run that was never killed,
with each step once everywhere, and nothing half written is left.
"""

from __future__ import annotations

import copy
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from choice import slow
from commands import PPO, cut_off, metrics, run, run_here, write_config, write_task
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from plimsoll.run.json_lines import read_rows

KILLED_AT = """
import fnmatch, os, signal, sys


def kill(event, values):
    if event == "os.rename" and fnmatch.fnmatch(str(values[0]), os.environ["KILLED_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)


if "KILLED_AT" in os.environ:
    sys.addaudithook(kill)
"""
"""A process that imports it is killed when it is about to give a path like this another name."""


def killed_ppo() -> dict[str, Any]:
    config = copy.deepcopy(PPO)
    config["run"] = {"directory": "whole", "steps": 3, "save_every": 1, "keep_checkpoints": 1}
    config["run"] |= {"eval_every": 2, "best": {"metric": "eval/reward", "goal": "highest"}}
    return config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("killed")
    write_task(home)
    write_config(home, "ppo", killed_ppo())
    (home / "sitecustomize.py").write_text(KILLED_AT)
    return home


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    assert run_here(home, "ppo", "ppo.yaml").code == 0
    return home / "whole"


@pytest.mark.parametrize(
    "path",
    [
        slow("*/tensorboard/.events*"),
        slow("*/checkpoints/.step-000001.partial-*"),
        "*/trajectories/.step-000002*",
        slow("*/checkpoints/step-000001"),
        slow("*/checkpoints/.step-000003.partial-*"),
        slow("*/.model.partial-*"),
    ],
    ids=["beginning", "first checkpoint", "trajectories", "pruning", "last checkpoint", "model"],
)
def test_a_killed_run_goes_on_as_if_it_had_not_been_killed(
    home: Path, whole: Path, path: str
) -> None:
    name = "".join(letter for letter in path if letter.isalnum())
    words = ("ppo", "ppo.yaml", "--run.directory", name)
    ended = run(home, *words, environment={"KILLED_AT": path})
    assert ended.code == -signal.SIGKILL, ended.err
    assert run_here(home, *words, "--run.resume", "auto").code == 0
    again = home / name
    assert metrics(again) == metrics(whole)
    assert written(again) == written(whole)
    for file in sorted(whole.glob("trajectories/*")):
        assert parquet.read_table(file) == parquet.read_table(again / "trajectories" / file.name)
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (again, whole)]
    assert weights[0] == weights[1]
    assert_each_step_once(again)


@pytest.mark.slow
def test_a_run_with_one_checkpoint_too_many_and_no_step_left(home: Path, whole: Path) -> None:
    """Such a run was killed after it wrote its last checkpoint, and before it removed the one
    before."""
    path = "*/checkpoints/step-000001"
    flags = ("--run.steps", "2", "--run.eval_every", "null", "--run.best", "null")
    words = ("ppo", "ppo.yaml", "--run.directory", "ended", *flags)
    ended = run(home, *words, environment={"KILLED_AT": path})
    assert ended.code == -signal.SIGKILL, ended.err
    assert run_here(home, *words, "--run.resume", "auto").code == 0
    assert [item.name for item in (home / "ended" / "checkpoints").iterdir()] == ["step-000002"]
    assert_each_step_once(home / "ended")


def test_a_checkpoint_with_the_name_of_another_step_is_refused(home: Path, whole: Path) -> None:
    cut_off(whole, home / "renamed", 3)
    last = home / "renamed" / "checkpoints" / "step-000003"
    last.rename(last.with_name("step-000007"))
    words = ("ppo", "ppo.yaml", "--run.directory", "renamed", "--run.resume", "auto")
    refused = run_here(home, *words)
    assert refused.code == 2
    assert re.search(r"step-000007 .*step 7\b.*state\.json.*step 3\b", refused.err)


def written(run: Path) -> list[str]:
    """Every file; event files are one for each part of a run, with names by the clock."""
    found = (path.relative_to(run) for path in run.rglob("*"))
    return sorted(str(path) for path in found if not path.name.startswith("events.out"))


def assert_each_step_once(run: Path) -> None:
    ledger = [
        (row["step"], row["phase"], row["process"]) for row in read_rows(run / "ledger.jsonl")
    ]
    assert len(ledger) == len(set(ledger))
    for tag, steps in shown_steps(run):
        assert len(steps) == len(set(steps)), tag


def shown_steps(run: Path) -> Iterator[tuple[str, list[int]]]:
    """Return the steps that TensorBoard shows, by the name of the figure."""
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    for tag in events.Tags()["scalars"]:
        yield tag, [event.step for event in events.Scalars(tag)]


def test_rows_are_on_the_disk_before_a_checkpoint_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the power fails, nothing else would write the rows of its steps."""
    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", watched)
    assert run_here(home, "ppo", "ppo.yaml", "--run.directory", "synced").code == 0
    watched_for = ("metrics.jsonl", "ledger.jsonl", "checkpoints")
    order = [name for name in synced if name in watched_for]
    assert order == [*watched_for] * 3
