"""The example with verifiers: its commands, with a few steps; where verifiers is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import column, metrics, run_here

PROJECT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("PLIMSOLL_VERIFIERS", PROJECT / ".venv-verifiers")) / "bin" / "python"
PLAYER = "examples/verifiers/player.py"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"verifiers is not installed in {PYTHON.parents[1]}"
)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A directory with tasks, the demo's model, and a player that serves."""
    shutil.copytree(PROJECT / "examples" / "verifiers", tmp_path / "examples" / "verifiers")
    (tmp_path / "runs" / "verifiers").mkdir(parents=True)
    tasks = ("--limit", "64", "--out", "runs/verifiers/tasks.jsonl")
    subprocess.run([PYTHON, PLAYER, "tasks", "sums", *tasks], cwd=tmp_path, check=True)
    assert run_here(tmp_path, "demo", "--files-only").code == 0
    short = ("--run.steps", "20", "--actor.optimizer.warmup_steps", "2")
    assert run_here(tmp_path, "sft", "runs/demo/sft.yaml", *short).code == 0
    command = [str(PYTHON), PLAYER, "play", "sums", "--socket", "runs/verifiers/player.sock"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as player:
        assert player.stdout is not None and player.stdout.readline()
        yield tmp_path
        player.terminate()


def test_episodes_of_verifiers_are_trained_on(home: Path) -> None:
    config = "examples/verifiers/grpo.yaml"
    outcome = run_here(home, "grpo", config, "--run.steps", "3", "--batch.prompts", "2")
    assert outcome.code == 0, outcome.err
    run = home / "runs" / "verifiers" / "grpo"
    assert len(column(metrics(run), "reward")) == 3
    assert max(column(metrics(run), "mismatch/abs")) < 1e-4
    assert set(column(metrics(run), "episode/turns")) == {1.0}
    assert (home / "runs" / "verifiers" / "player.sock").stat().st_mode & 0o077 == 0


def test_a_key_that_the_environment_lacks_is_named(home: Path) -> None:
    wrong = [str(PYTHON), PLAYER, "play", "sums", "--options", '{"agent": {"max_turn": 3}}']
    done = subprocess.run(wrong, cwd=home, capture_output=True, text=True)
    assert done.returncode == 1 and "agent.max_turn: Extra inputs" in done.stderr
