"""Numbers that are not finite: the step is left out, written down and counted, and too many of them
in a row end the run, which names the figure."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from commands import GRPO, run, run_here, write_config, write_task

OWN = """
import os
from dataclasses import replace

from plimsoll.algorithm.advantage import reinforce as plain_advantages
from plimsoll.algorithm.policy_loss import clip as plain_loss
from plimsoll.algorithm.preference_loss import simpo as plain_preference

calls = [0]
BAD = float("nan")


def bad_now():
    calls[0] += 1
    return calls[0] in map(int, os.environ["BAD_CALLS"].split(","))


def policy(inputs):
    output = plain_loss(inputs)
    return replace(output, loss_L=output.loss_L * BAD) if bad_now() else output


def advantages(inputs):
    output = plain_advantages(inputs)
    if bad_now():
        output.advantages_L[0] = BAD
    return output


def scores(trajectory):
    return float("inf") if trajectory.prompt.index == 4 and trajectory.sample_index == 1 else 0.5


def preference(inputs):
    output = plain_preference(inputs)
    return replace(output, loss=output.loss * BAD) if bad_now() else output
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_task(tmp_path)
    (tmp_path / "spoilt.py").write_text(OWN)
    return tmp_path


def rows(home: Path) -> list[dict[str, Any]]:
    lines = (home / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def bad_rows(home: Path) -> list[float | None]:
    return [row.get("bad_steps") for row in rows(home)]


def grpo(**algorithm: Any) -> dict[str, Any]:
    settings = copy.deepcopy(GRPO)
    settings["run"] = {"directory": "run", "steps": 3, "tensorboard": False}
    settings["batch"] = {"prompts": 4, "responses": 2, "micro_batch_tokens": 4000}
    settings["rewards"] = {"length": {"name": "length"}}
    settings["rollout"] |= {"sampling": {"max_new_tokens": 8}}
    settings["algorithm"] = algorithm
    return settings


def test_a_loss_that_is_nan_once_leaves_its_step_out(home: Path) -> None:
    write_config(home, "grpo", grpo(policy_loss={"name": "spoilt:policy"}))
    outcome = run(home, "grpo", "grpo.yaml", environment={"BAD_CALLS": "2"})
    assert outcome.code == 0, outcome.err
    said = " ".join(outcome.out.split())
    assert "step 2 has numbers" in said and "gradient of the actor" in said
    assert bad_rows(home) == [None, 1.0, None]
    assert [row["actor/skipped_steps"] for row in rows(home)] == [0, 1, 0]
    shown = run_here(home, "rollouts", "run", "--bad", "--count", "9")
    assert shown.code == 0 and shown.out.count("group") >= 4, shown.out
    assert [path.name for path in (home / "run" / "bad").iterdir()] == ["step-000002.parquet"]


@pytest.mark.slow
def test_an_advantage_that_is_nan_is_caught_before_anything_learns_from_it(home: Path) -> None:
    write_config(home, "grpo", grpo(advantage={"name": "spoilt:advantages"}))
    outcome = run(home, "grpo", "grpo.yaml", environment={"BAD_CALLS": "1"})
    assert outcome.code == 0, outcome.err
    said = " ".join(outcome.out.split())
    assert "step 1 has numbers" in said and "the advantages of group" in said
    assert bad_rows(home) == [1.0, None, None]
    first, second, _ = rows(home)
    assert "actor/loss" not in first and "actor/loss" in second
    assert first["reward"] is not None and first["tokens"] > 0


def test_a_reward_that_is_infinite_leaves_its_step_out(home: Path) -> None:
    """A clip must not hide it, and it must not spoil the rewards' mean for later steps."""
    settings = grpo()
    settings["rewards"] = {"own": {"name": "spoilt:scores", "clip": [0, 1], "normalize": True}}
    settings["data"]["shuffle"] = False
    write_config(home, "grpo", settings)
    outcome = run(home, "grpo", "grpo.yaml")
    assert outcome.code == 0, outcome.err
    said = " ".join(outcome.out.split())
    assert "step 2 has numbers" in said and "reward own of group 0 (row 4)" in said
    assert bad_rows(home) == [None, 1.0, None]
    first, second, third = rows(home)
    assert second["reward"] is None and "actor/loss" not in second
    assert first["reward"] is not None and third["reward"] is not None  # its moments are whole
    shown = run_here(home, "rollouts", "run", "--bad", "--count", "9")
    assert shown.code == 0 and "inf" in shown.out, shown.out


@pytest.mark.slow
def test_too_many_in_a_row_end_the_run_and_the_figure_is_named(home: Path) -> None:
    write_config(home, "grpo", grpo(policy_loss={"name": "spoilt:policy"}))
    flags = ("--run.max_bad_steps", "1", "--run.save_every", "1")
    outcome = run(home, "grpo", "grpo.yaml", *flags, environment={"BAD_CALLS": "2,3"})
    assert outcome.code == 1
    assert "step 3 has numbers" in outcome.err
    assert "run.max_bad_steps allows 1 in a row" in outcome.err
    assert "--run.resume auto" in outcome.err
    again = run(home, "grpo", "grpo.yaml", "--run.resume", "auto", environment={"BAD_CALLS": "0"})
    assert again.code == 0 and "resumed after step 2" in again.out, again.err


@pytest.mark.slow
def test_a_job_on_rows_writes_the_sequences_of_a_bad_step(home: Path) -> None:
    lines = (home / "rows.jsonl").read_text().splitlines()
    pairs = [json.loads(line) | {"rejected": " #### 9"} for line in lines]
    (home / "rows.jsonl").write_text("\n".join(map(json.dumps, pairs)) + "\n")
    settings: dict[str, Any] = {
        "run": {"directory": "run", "steps": 3, "tensorboard": False},
        "cluster": {"where": "local", "threads": 1},
        "data": {
            "train": {
                **{"path": "rows.jsonl", "prompt": "prompt"},
                **{"chosen": "response", "rejected": "rejected"},
            },
            "chat_template": "none",
            "max_tokens": 16,
        },
        "batch": {"pairs": 4, "micro_batch_tokens": 4000},
        "actor": {"model": {"path": "model", "dtype": "float32"}},
        "algorithm": {"loss": {"name": "spoilt:preference"}},
    }
    write_config(home, "dpo", settings)
    outcome = run(home, "dpo", "dpo.yaml", environment={"BAD_CALLS": "2"})
    assert outcome.code == 0, outcome.err
    assert bad_rows(home) == [None, 1.0, None]
    shown = run_here(home, "rollouts", "run", "--bad")
    assert shown.out.count("step 2, sequence ") == 8 and "+ " in shown.out, shown.out
