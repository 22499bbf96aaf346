"""Tasks of reasoning-gym, trained on in real runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from commands import GRPO, column, cut_off, metrics, run_here, write_config, write_task

from plimsoll.data.generated import INSTALL, LIBRARY
from plimsoll.records import Trajectory
from plimsoll.run.directory import RunDirectory
from plimsoll.run.trajectories import read_trajectories

STEPS = 20
BASE: dict[str, Any] = GRPO | {
    "batch": {"prompts": 4, "responses": 8, "micro_batch_tokens": 4096},
    "actor": GRPO["actor"] | {"optimizer": {"learning_rate": 0.01}},
    "rollout": GRPO["rollout"] | {"sampling": {"max_new_tokens": 3}},
}
needs_gym = pytest.mark.skipif(
    importlib.util.find_spec(LIBRARY) is None, reason=f"reasoning-gym is not installed: {INSTALL}"
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_task(tmp_path)
    return tmp_path


def trajectories(run: Path) -> list[Trajectory]:
    files = RunDirectory(run).trajectories().values()
    return [one for path in files for one in read_trajectories(path)]


def run_of(name: str, **more: Any) -> dict[str, Any]:
    return {"directory": name, "steps": STEPS, "tensorboard": False} | more


def divisors(seed: int, size: int) -> dict[str, Any]:
    generate = {"tasks": ("gcd",), "size": size, "seed": seed}
    columns = {"prompt": "question", "reference": "answer", "source": "task"}
    return {"path": LIBRARY, "generate": generate, **columns}


@needs_gym
def test_a_task_of_reasoning_gym_is_learned_and_gone_on_with(home: Path) -> None:
    """The model's tokenizer knows the digits of the questions, and nothing else of them: it learns
    that most numbers have the greatest common divisor 1."""
    config = BASE | {
        "run": run_of("gym", save_every=10, eval_every=10),
        "data": {
            **{"train": divisors(1, 200), "eval": divisors(2, 40)},
            **{"chat_template": "none", "max_tokens": 128},
        },
        "batch": BASE["batch"] | {"prompts": 16},
        "rollout": GRPO["rollout"] | {"sampling": {"max_new_tokens": 2}},
        "rewards": {"right": {"name": "reasoning_gym", "process": True, "options": {"tag": ""}}},
    }
    write_config(home, "gym", config)
    whole = run_here(home, "grpo", "gym.yaml")
    assert whole.code == 0, whole.err
    rewards = column(metrics(home / "gym"), "reward")
    assert len(rewards) == STEPS and fmean(rewards[-5:]) > 2 * fmean(rewards[:3])
    assert len(column(metrics(home / "gym"), "eval/gcd/right")) == 3
    found = trajectories(home / "gym")
    right = [one for one in found if one.response_text.strip() == one.prompt.reference]
    assert right and all(one.reward == 1.0 for one in right)
    cut_off(home / "gym", home / "again", step=10)
    flags = ("--run.directory", "again", "--run.resume", "auto")
    outcome = run_here(home, "grpo", "gym.yaml", *flags)
    assert outcome.code == 0, outcome.err
    assert column(metrics(home / "again"), "actor/loss") == column(
        metrics(home / "gym"), "actor/loss"
    )
