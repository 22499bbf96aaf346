"""Runs whose length is given in epochs: the same as in steps, also when they go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import PPO, SFT, column, metrics, run_here, write_config, write_task

JOBS: dict[str, tuple[dict[str, Any], str, int]] = {
    "sft": (SFT, "batch.sequences", 5),
    "ppo": (PPO, "batch.prompts", 5),
}
"""By job: its config, the rows of a step, and how many."""
IN_EPOCHS = ["--run.steps", "null", "--run.eval_every", "null", "--run.save_every", "null"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_task(tmp_path)
    for job, (config, _, _) in JOBS.items():
        write_config(tmp_path, job, config)
    return tmp_path


@pytest.mark.parametrize("job", JOBS)
def test_epochs_are_so_many_steps_and_a_run_goes_on_to_more(home: Path, job: str) -> None:
    _, key, taken = JOBS[job]
    rows = len((home / "rows.jsonl").read_text().splitlines())
    steps = -(-2 * rows // taken)
    flat = ["--actor.optimizer.schedule", "constant", "--actor.optimizer.warmup_steps", "0"]
    common = [job, f"{job}.yaml", f"--{key}", str(taken), *flat, *IN_EPOCHS]
    if job == "ppo":
        common += ["--algorithm.mini_batches", "1", "--algorithm.epochs", "1"]
    assert run_here(home, *common, "--run.epochs", "2", "--run.directory", "whole").code == 0
    again = [*common, "--run.directory", "parts", "--run.resume", "auto"]
    assert run_here(home, *again, "--run.epochs", "1").code == 0
    assert len(metrics(home / "parts")) == -(-rows // taken)
    assert run_here(home, *again, "--run.epochs", "2").code == 0
    loss = "loss" if job == "sft" else "actor/loss"
    found = [column(metrics(home / name), loss) for name in ("whole", "parts")]
    assert len(found[0]) == steps and found[0] == found[1]
    assert metrics(home / "whole")[-1]["epoch"] == pytest.approx(steps * taken / rows)
