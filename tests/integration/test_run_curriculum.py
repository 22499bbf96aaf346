"""Prompts drawn by a column's numbers, each with a limit of its own, in a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
from commands import run_here, write_config, write_task

GRPO: dict[str, Any] = {
    "run": {"directory": "run", "steps": 3, "save_every": 2, "tensorboard": False},
    "cluster": {"where": "local", "threads": 1},
    "data": {
        "train": {
            "path": "levels.jsonl",
            "prompt": "prompt",
            "order_by": "level",
            "max_new_tokens": "most",
        },
        "chat_template": "none",
        "max_tokens": 8,
    },
    "batch": {"prompts": 4, "responses": 2, "micro_batch_tokens": 60},
    "actor": {
        "model": {"path": "model", "dtype": "float32"},
        "optimizer": {"learning_rate": 0.002},
    },
    "rewards": {"length": {"name": "length"}},
    "rollout": {"transformers": {}, "dtype": "float32", "sampling": {"max_new_tokens": 8}},
}
LEVELS = (3, 0, 2, 1, 3, 1, 0, 2)


def sampled(directory: Path) -> list[dict[str, Any]]:
    files = sorted(directory.glob("trajectories/*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


def test_prompts_come_by_level_with_their_limits_and_a_resumed_run_goes_on_there(
    tmp_path: Path,
) -> None:
    write_task(tmp_path)
    rows = [
        {"prompt": f"{a}+1=", "level": level, "most": 2 + level} for a, level in enumerate(LEVELS)
    ]
    (tmp_path / "levels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_config(tmp_path, "grpo", GRPO)
    assert run_here(tmp_path, "grpo", "grpo.yaml").code == 0
    whole = sampled(tmp_path / "run")
    levels = [LEVELS[row["prompt_index"]] for row in whole[::2]]
    assert levels == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1]
    cut = [row for row in whole if row["finish_reason"] == "length"]
    assert {LEVELS[row["prompt_index"]] for row in cut} == {0, 1, 2, 3}
    assert all(len(row["tokens"]) == 2 + LEVELS[row["prompt_index"]] for row in cut)
    assert all(len(row["tokens"]) <= 2 + LEVELS[row["prompt_index"]] for row in whole)
    words = ("grpo", "grpo.yaml", "--run.directory", "again")
    assert run_here(tmp_path, *words, "--run.steps", "2").code == 0
    assert run_here(tmp_path, *words, "--run.resume", "auto").code == 0
    assert sampled(tmp_path / "again") == whole
    rows[5]["level"] = "hard"
    (tmp_path / "levels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = run_here(tmp_path, *words[:2], "--run.directory", "bad")
    assert outcome.code != 0 and "levels.jsonl:6: level: must be a number" in outcome.err
