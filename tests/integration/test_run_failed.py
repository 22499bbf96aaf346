"""Runs that fail in the middle: what the console says, what is found in the directory afterwards,
and that they go on."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import GRPO, Outcome, run, run_here, write_config, write_task

from plimsoll.page.progress import progress
from plimsoll.page.watched import watch_runs

FUNCTION = """
import shutil, sys, time
from pathlib import Path

def reward(trajectory):
    home = Path(__file__).parent
    does = home / "does"
    if does.exists() and (home / "run/checkpoints/step-000001").exists():
        match does.read_text():
            case "raise":
                print("about to raise", file=sys.stderr)
                raise ValueError("no such thing")
            case "hang":
                time.sleep(60)
            case "spoil" if (home / "run/trajectories").is_dir():
                shutil.rmtree(home / "run/trajectories")
                (home / "run/trajectories").touch()
    return float(len(trajectory.response_tokens))
"""
CONFIG: dict[str, Any] = GRPO | {
    "run": {"directory": "run", "steps": 2, "save_every": 1, "tensorboard": False},
    "batch": {"prompts": 4, "responses": 2, "micro_batch_tokens": 60},
    "rollout": GRPO["rollout"]
    | {"transformers": {"max_sequences": 4}, "sampling": {"max_new_tokens": 8}},
    "rewards": {"mine": {"name": "own_reward_in_a_run:reward", "time_limit": 0.5, "retries": 1}},
}
GO_ON = (
    "  Saved: run/checkpoints/step-000001. To go on after step 1: run the same command with "
    "--run.resume auto\n"
    "  Log, with the traceback: run/run.log\n"
)
TOO_MANY = "2 groups of a step of 4"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_task(tmp_path)
    (tmp_path / "own_reward_in_a_run.py").write_text(FUNCTION)
    write_config(tmp_path, "grpo", CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_reward_in_a_run", None)
    return tmp_path


def state(home: Path) -> str:
    (seen,) = watch_runs([home / "run"])
    return str(progress(seen.look())["state"])


def logged(home: Path) -> str:
    """The log without the times."""
    lines = (home / "run" / "run.log").read_text().splitlines()
    return "".join(f"{line[20:]}\n" for line in lines)


def test_a_run_whose_reward_raises_is_failed_logged_and_goes_on(home: Path) -> None:
    """In a process of its own, with its real streams."""
    assert run(home, "grpo", "grpo.yaml", "--dry-run").code == 0
    assert not (home / "run").exists()
    (home / "does").write_text("raise")
    failed = run(home, "grpo", "grpo.yaml")
    assert failed.code == 1
    first, *rest = failed.err.partition("error: ")[2].splitlines(keepends=True)
    assert TOO_MANY in first and "batch.max_failed_groups" in first
    assert re.search(r"row \d+.* data\.train .*ValueError: no such thing\.", first)
    assert re.search(r"phase rollout of step 2$", rest[0].rstrip())
    assert rest[-2:] == GO_ON.splitlines(keepends=True)
    assert state(home) == f"failed: {first.strip()}"
    log = logged(home)
    assert failed.out and all(line in log for line in failed.out.splitlines())
    assert "\nabout to raise\n" in log and "\nTraceback (most recent call last):\n" in log
    assert ", in converse\n" in log and first in log

    (home / "does").unlink()
    done = run(home, "grpo", "grpo.yaml", "--run.resume", "auto")
    assert done.code == 0, done.err
    assert state(home) == "done"
    assert logged(home).startswith(log)
    assert all(line in logged(home).removeprefix(log) for line in done.out.splitlines())


@pytest.mark.slow
def test_a_reward_that_hangs_is_reported_at_once_and_ends_the_run(home: Path) -> None:
    (home / "does").write_text("hang")
    outcome: Outcome = run_here(home, "grpo", "grpo.yaml")
    assert outcome.code == 1
    (note,) = [line for line in outcome.out.splitlines() if "rewards.mine.time_limit" in line]
    assert "'mine' (own_reward_in_a_run:reward), at" in note
    assert "0.5 s (rewards.mine.time_limit)" in note
    assert re.search(r" 1 more time\. .*1 group.*\(batch\.max_failed_groups\)\.$", note)
    assert TOO_MANY in outcome.err
    assert outcome.err.endswith(GO_ON)
    assert note in logged(home) and state(home).startswith("failed: rewards ")


def test_a_file_that_cannot_be_written_ends_the_run_in_the_same_way(home: Path) -> None:
    (home / "does").write_text("spoil")
    failed = run_here(home, "grpo", "grpo.yaml")
    assert failed.code == 1 and failed.err.endswith(GO_ON), failed.err
    assert state(home).startswith("failed: Cannot write run/trajectories/step-000002.parquet")
