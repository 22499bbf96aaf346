"""A preset as its paper has it, in a real run: DAPO with its length penalty, and its groups looked
at by what is right."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import yaml
from commands import GRPO, column, metrics, run_here, write_config, write_task

STEPS, PROMPTS, RESPONSES, LONGEST = 2, 2, 16, 10
CONFIG: dict[str, Any] = GRPO | {
    "variant": "paper",
    "run": {"directory": "dapo", "steps": STEPS, "tensorboard": False},
    "batch": {"prompts": PROMPTS, "micro_batch_tokens": 60},
    "rewards": {"seven": {"name": "pattern", "options": {"pattern": r"^7"}}},
    "rollout": GRPO["rollout"]
    | {"transformers": {"max_sequences": RESPONSES}, "sampling": {"max_new_tokens": LONGEST}},
}
"""One in 32 tokens is a 7, so many groups have none; their penalties differ all the same."""


def test_dapo_of_the_paper_runs_from_one_line(tmp_path: Path) -> None:
    write_task(tmp_path)
    write_config(tmp_path, "dapo", CONFIG)
    outcome = run_here(tmp_path, "dapo", "dapo.yaml")
    assert outcome.code == 0, outcome.err
    written = yaml.safe_load((tmp_path / "dapo" / "config.yaml").read_text())
    assert written["batch"]["dynamic_sampling"]["by"] == "seven"
    steps = [
        parquet.read_table(path).to_pylist()
        for path in sorted((tmp_path / "dapo").glob("trajectories/*.parquet"))
    ]
    for rows in steps:
        assert len(rows) == PROMPTS * RESPONSES
        for row in rows:  # -1 for 10 tokens, -1/2 for 9, 0 below: a buffer of a fifth of 10
            assert row["reward_overlong"] == -max(0, len(row["tokens"]) - 8) / 2
    figures = metrics(tmp_path / "dapo")
    idle, drawn = column(figures, "groups/idle"), column(figures, "groups/drawn")
    assert sum(idle) > 0 and column(figures, "ratio_clamped") == [0] * STEPS
    for number, rows in enumerate(steps):
        groups = [list(own) for _, own in groupby(rows, key=lambda row: row["group"])]
        taught = [len({row["reward_seven"] for row in own}) > 1 for own in groups]
        # By the sum of its parts every group would have taught.
        assert all(len({row["reward"] for row in own}) > 1 for own in groups)
        assert all(taught) or drawn[number] == 4 * PROMPTS
        assert taught.count(True) == min(PROMPTS, round((1 - idle[number]) * drawn[number]))
