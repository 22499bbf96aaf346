from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from plimsoll.config.run import KeptTrajectories, RunConfig
from plimsoll.errors import CheckpointDamaged, ConfigError, PlimsollError
from plimsoll.records import Prompt, RewardPart, Trajectory, single_turn
from plimsoll.run.directory import (
    LOCK_FILE,
    RunDirectory,
    TrajectoryPruner,
    leave_out_damaged,
    lock_directory,
    open_run,
)
from plimsoll.run.files import whole_directory, write_whole
from plimsoll.run.json_lines import append_row, read_rows, write_rows
from plimsoll.run.state import measure_file, write_manifest
from plimsoll.run.trajectories import write_trajectories

Resume = Literal["never", "auto", "must"]


def config(path: Path, resume: Resume = "never") -> RunConfig:
    return RunConfig(directory=str(path), steps=10, resume=resume)


def save(run: RunDirectory, step: int, manifest: bool = False) -> None:
    with whole_directory(run.checkpoint_path(step)) as partial:
        (partial / "weights").write_text(str(step))
        if manifest:
            write_manifest(partial, [measure_file(partial, "weights")])


def trajectory(index: int, sample: int, tokens: list[int]) -> Trajectory:
    return single_turn(
        prompt=Prompt(index, np.array([1, 2]), f"What is {index}?", str(index)),
        sample_index=sample,
        response_tokens=np.array(tokens),
        sampler_logprobs=np.array([-0.5] * len(tokens), dtype=np.float32),
        response_text=f"It is {index}.",
        finish_reason="stop",
        weight_version=3,
        rewards=(RewardPart("right", 1.0, 2.0), RewardPart("form", 0.5)),
    )


def test_a_new_run_has_its_config_and_no_checkpoint(tmp_path: Path) -> None:
    with open_run(config(tmp_path / "a" / "run")) as run:
        run.write_config("seed: 0\n")
        assert run.config_path.read_text() == "seed: 0\n"
        assert run.latest_checkpoint() is None


def test_never_refuses_a_directory_that_holds_a_run(tmp_path: Path) -> None:
    with open_run(config(tmp_path)) as run:
        run.write_config("")
        save(run, 4)
    with pytest.raises(ConfigError) as caught:
        open_run(config(tmp_path))
    message = str(caught.value)
    assert str(tmp_path) in message and "step 4" in message and "resume: auto" in message
    open_run(config(tmp_path, "auto")).close()  # the refusal kept no lock


def test_never_takes_a_directory_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    open_run(config(tmp_path)).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_must_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint to resume from"):
        open_run(config(tmp_path, "must"))
    with open_run(config(tmp_path, "auto")) as run:
        save(run, 1)
    with open_run(config(tmp_path, "must")) as run:
        assert run.latest_checkpoint() == (1, run.checkpoint_path(1))


@pytest.mark.parametrize("below", ["", "run"])
def test_a_directory_that_is_a_file_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*cannot be used"):
        open_run(config(tmp_path / "file" / below))


def test_resume_has_each_step_once(tmp_path: Path) -> None:
    """Killed in step 7, with the last checkpoint at 4 and one half-written at 6."""
    with open_run(config(tmp_path)) as run:
        for step in range(1, 7):
            append_row(run.metrics_path, {"step": step, "part": 1})
            write_trajectories(run.trajectories_path(step), step, [trajectory(0, 0, [5])])
        save(run, 2)
        save(run, 4)
    (run.path / "checkpoints" / ".step-000006.partial-12345678").mkdir()
    (run.path / "trajectories" / ".step-000007.parquet.partial-12345678").write_text("half")
    event_file = run.tensorboard_path / ".events.out.tfevents.partial-12345678"
    event_file.parent.mkdir()
    event_file.write_text("half")
    (run.path / ".git").mkdir()  # not the run's
    with run.metrics_path.open("a") as file:
        file.write('{"step": 7, "pa')

    with open_run(config(tmp_path, "auto")) as run:
        assert run.latest_checkpoint() == (4, run.checkpoint_path(4))
        for step in range(5, 9):
            append_row(run.metrics_path, {"step": step, "part": 2})
        found = [(row["step"], row["part"]) for row in read_rows(run.metrics_path)]
    assert found == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2), (7, 2), (8, 2)]
    assert list(run.trajectories()) == [1, 2, 3, 4, 5, 6], "the resumed run may learn from them"
    run.remove_trajectories_after(4)
    assert list(run.trajectories()) == [1, 2, 3, 4]
    assert sorted(item.name for item in (tmp_path / "checkpoints").iterdir()) == [
        "step-000002",
        "step-000004",
    ]
    assert [item.name for item in tmp_path.rglob(".*")] == [".git"]


def test_each_thousand_steps_of_trajectories_has_a_folder(tmp_path: Path) -> None:
    """Earlier versions had all in one, which are found, too."""
    run = RunDirectory(tmp_path)
    assert run.last_sampled_step() is None and run.trajectories() == {}
    names = {7: "step-000007", 999: "step-000999", 1000: "001000/step-001000"}
    names |= {1001: "001000/step-001001", 12_345: "012000/step-012345"}
    names |= {10**6: "1000000/step-1000000"}
    for step, name in names.items():
        assert run.trajectories_path(step) == tmp_path / "trajectories" / f"{name}.parquet"
        write_whole(run.trajectories_path(step), "")
        assert run.last_sampled_step() == step
    older = tmp_path / "trajectories" / "step-005000.parquet"
    older.touch()
    assert run.trajectories_path(5000) == older
    assert list(run.trajectories()) == [7, 999, 1000, 1001, 5000, 12_345, 10**6]
    run.remove_trajectories_after(1000)
    assert list(run.trajectories()) == [7, 999, 1000] and run.last_sampled_step() == 1000
    partial = run.trajectories_path(1002).with_name(".step-001002.parquet.partial-12345678")
    partial.touch()
    open_run(config(tmp_path, "auto")).close()
    assert not partial.exists()


@pytest.mark.parametrize(
    ("kept", "checkpoints", "left"),
    [
        (True, [], [*range(1, 11)]),
        ({"last": None}, [10], [*range(1, 11)]),
        ({"last": 2}, [], [9, 10]),
        ({"last": 2}, [5, 8], [6, 7, 8, 9, 10]),  # the one before the last may be resumed from
        ({"last": 2}, [2, 8, 10], [9, 10]),
        ({"last": 2, "every": 4}, [2, 8, 10], [4, 8, 9, 10]),
        ({"last": 0, "every": 4}, [9, 10], [4, 8, 10]),
    ],
)
def test_trajectories_that_are_not_kept_go_once_no_resume_needs_them(
    kept: object, checkpoints: list[int], left: list[int], tmp_path: Path
) -> None:
    """Without a checkpoint so far everything stays if there will be one."""
    fields: dict[str, Any] = {"save_every": 1} if checkpoints else {}
    settings = RunConfig.model_validate(
        {"directory": str(tmp_path), "steps": 10, "keep_trajectories": kept, **fields}
    )
    run = RunDirectory(tmp_path)
    pruner = TrajectoryPruner(run, settings)
    for step in range(1, 11):
        write_whole(run.trajectories_path(step), "")
        if step in checkpoints:
            save(run, step)
        pruner.prune(step)
        if step < min(checkpoints, default=0):
            assert len(run.trajectories()) == step
    assert list(run.trajectories()) == left


def test_trajectories_after_the_only_checkpoint_stay(tmp_path: Path) -> None:
    """Such as one of Ctrl-C, in a run that writes no others."""
    run = RunDirectory(tmp_path)
    settings = RunConfig(directory=str(tmp_path), keep_trajectories=KeptTrajectories(last=2))
    pruner = TrajectoryPruner(run, settings)
    save(run, 3)
    for step in range(1, 11):
        write_whole(run.trajectories_path(step), "")
        pruner.prune(step)
    assert list(run.trajectories()) == [*range(4, 11)]


def test_no_trajectories_are_written_where_none_are_kept() -> None:
    written = [
        KeptTrajectories.model_validate(value).are_written
        for value in (True, False, {}, {"last": 0}, {"last": 0, "every": 3})
    ]
    assert written == [True, False, True, False, True]


def test_auto_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    with open_run(config(tmp_path)) as run:
        append_row(run.metrics_path, {"step": 1})
    with open_run(config(tmp_path, "auto")) as run:
        assert read_rows(run.metrics_path) == []


def test_the_latest_checkpoint_is_the_one_of_the_largest_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in (999_999, 1_000_000, 20):
        save(run, step)
    assert run.latest_checkpoint() == (1_000_000, tmp_path / "checkpoints" / "step-1000000")


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_used(
    resume: Resume, tmp_path: Path
) -> None:
    """Twice, as the same step may be damaged again. The first checkpoint has no manifest."""
    for again in ("", "-2"):
        notes: list[str] = []
        with open_run(config(tmp_path, "auto")) as run:
            for step in (2, 4, 6):
                save(run, step, manifest=step > 2)
                append_row(run.metrics_path, {"step": step})
        (run.checkpoint_path(4) / "weights").write_text("44")
        (run.checkpoint_path(6) / "weights").write_text("7")
        with open_run(config(tmp_path, resume), notes.append) as run:
            assert run.latest_checkpoint() == (2, run.checkpoint_path(2))
            assert {row["step"] for row in read_rows(run.metrics_path)} == {2}
        aside = [run.checkpoint_path(s).with_name(f"step-00000{s}.damaged{again}") for s in (6, 4)]
        assert [(path / "weights").read_text() for path in aside] == ["7", "44"]
        assert [note.split(" is damaged: ")[0] for note in notes] == [
            str(run.checkpoint_path(step)) for step in (6, 4)
        ]
        assert "weights has the xxh3 checksum" in notes[0] and aside[0].name in notes[0]
        assert "weights has 2 bytes (1 expected)" in notes[1]
        assert all(f"goes on from {run.checkpoint_path(2)}" in note for note in notes)


def test_what_ranks_find_damaged_is_put_aside_if_there_is_another(tmp_path: Path) -> None:
    """The contents of a role's files are left to the ranks that read them."""
    with open_run(config(tmp_path)) as run:
        for step in (2, 4):
            with whole_directory(run.checkpoint_path(step)) as partial:
                (partial / "actor").mkdir()
                (partial / "actor" / "weights").write_text(str(step))
                write_manifest(partial, [measure_file(partial, "actor/weights")])
    (run.checkpoint_path(4) / "actor" / "weights").write_text("5")
    with open_run(config(tmp_path, "auto")) as run:
        assert run.latest_checkpoint() == (4, run.checkpoint_path(4))
    error: PlimsollError = leave_out_damaged(run, 4, "actor/weights is wrong")
    assert isinstance(error, CheckpointDamaged) and error.fault == "process"
    assert str(error) == (
        f"{run.checkpoint_path(4)} is damaged: actor/weights is wrong. It is kept as "
        f"step-000004.damaged, and the run goes on from {run.checkpoint_path(2)}"
    )
    error = leave_out_damaged(run, 2, "actor/weights is gone")
    assert isinstance(error, ConfigError) and "No checkpoint of" in str(error)
    assert run.latest_checkpoint() == (2, run.checkpoint_path(2))


def test_without_a_whole_checkpoint_nothing_is_changed(tmp_path: Path) -> None:
    with open_run(config(tmp_path)) as run:
        for step in (1, 2):
            save(run, step, manifest=True)
            append_row(run.metrics_path, {"step": step})
            (run.checkpoint_path(step) / "weights").unlink()
    with pytest.raises(ConfigError, match=r"No checkpoint of .* is whole") as refusal:
        open_run(config(tmp_path, "auto"))
    for step in (1, 2):
        assert f"{run.checkpoint_path(step)}: weights is missing (1 bytes" in str(refusal.value)
    assert [row["step"] for row in read_rows(run.metrics_path)] == [1, 2]
    assert run.latest_checkpoint() == (2, run.checkpoint_path(2))
    open_run(config(tmp_path / "other")).close()


def test_pruning_keeps_the_last_ones(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in (10, 20, 30):
        save(run, step)
    run.prune_checkpoints(keep=5)
    run.prune_checkpoints(keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000020",
        "step-000030",
    ]


def test_the_best_checkpoint_is_never_pruned(tmp_path: Path) -> None:
    run = open_run(config(tmp_path))
    for step in (1, 2, 3, 4):
        save(run, step)
    run.prune_checkpoints(keep=1, best_step=2)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    run.close()
    assert kept == ["step-000002", "step-000004"]


def test_a_second_process_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    program = """
import sys
from plimsoll.config.run import KeptTrajectories, RunConfig
from plimsoll.errors import ConfigError
from plimsoll.run.directory import open_run
try:
    open_run(RunConfig(directory=sys.argv[1], steps=1, resume="auto"))
except ConfigError as error:
    sys.exit(str(error))
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    (tmp_path / LOCK_FILE).write_text("4194305\n")  # of one that has ended
    with open_run(config(tmp_path)):
        second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 1
    assert f"in use by process {os.getpid()}:" in second.stderr
    third = subprocess.run(command, capture_output=True, text=True)
    assert third.returncode == 0, third.stderr


@pytest.mark.parametrize("number", ["", "4194305"], ids=["none yet", "of one that has ended"])
def test_a_lock_just_taken_names_no_process(number: str, tmp_path: Path) -> None:
    """No process has a number over 2^22."""
    with (tmp_path / LOCK_FILE).open("w") as held:
        held.write(number)
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is in use by another process: two runs"):
            lock_directory(tmp_path)


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from plimsoll.config.run import KeptTrajectories, RunConfig
from plimsoll.run.directory import open_run
run = open_run(RunConfig(directory=sys.argv[1], steps=1))
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)])
    assert killed.returncode == -9
    open_run(config(tmp_path)).close()


def test_bad_rows_are_listed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    row = {"file": "a.jsonl", "line": 3, "field": "prompt", "why": "empty"}
    write_rows(run.bad_rows_path, [row])
    assert [json.loads(line) for line in run.bad_rows_path.read_text().splitlines()] == [row]


def test_a_run_that_was_refused_before_its_first_step_does_not_block_the_directory(
    tmp_path: Path,
) -> None:
    config = RunConfig(directory=str(tmp_path / "run"), steps=1)
    with open_run(config) as run:
        run.write_config("seed: 0\n")  # then, say, a row of the data was bad
    with open_run(config) as run:
        append_row(run.metrics_path, {"step": 1})
    with pytest.raises(ConfigError, match="already holds a run"):
        open_run(config)


def test_what_was_half_written_goes_when_the_run_ends(tmp_path: Path) -> None:
    with open_run(config(tmp_path)) as run:
        (run.path / ".model.partial-12345678").mkdir()
        (run.path / "checkpoints" / ".step-000003.partial-12345678").mkdir(parents=True)
        (run.path / ".exported.partial-12345678").mkdir()  # another command at work
    assert [found.name for found in tmp_path.rglob(".*")] == [".exported.partial-12345678"]


def test_a_run_that_is_refused_leaves_the_directory_as_it_is(tmp_path: Path) -> None:
    (tmp_path / ".model.partial-12345678").mkdir()
    with pytest.raises(ConfigError, match="no checkpoint to resume from"):
        open_run(config(tmp_path, "must"))
    assert list(tmp_path.glob(".*"))
