"""A run whose engines sample while the ranks train: how old what it learns from is, that nothing is
lost or learned twice, and that a replay learns the same."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from choice import slow
from commands import GRPO, VLLM, cut_off, metrics, run_here, write_config, write_task
from safetensors.torch import load_file

from plimsoll.records import Trajectory
from plimsoll.run.directory import RunDirectory
from plimsoll.run.trajectories import read_trajectories

pytestmark = pytest.mark.engine

STEPS, PROMPTS, RESPONSES = 6, 4, 4
CONFIG: dict[str, Any] = copy.deepcopy(GRPO) | {
    "preset": "grpo",
    "run": {"directory": "whole", "steps": STEPS, "save_every": 2, "keep_checkpoints": 9},
    "cluster": {"where": "ray", "threads": 1},
    "batch": {"prompts": PROMPTS, "responses": RESPONSES, "micro_batch_tokens": 400},
    "rewards": {"length": {"name": "length"}, "answer": {"name": "exact_match"}},
    "rollout": {**GRPO["rollout"], "staleness": 1, "sampling": {"max_new_tokens": 24}},
}
CLOCKED = ("sync/", "groups/", "idle/")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run on vLLM that evaluates, too."""
    home = tmp_path_factory.mktemp("asynchronous")
    write_task(home)
    config = copy.deepcopy(CONFIG)
    config["rollout"] |= VLLM
    config["run"]["eval_every"] = 3
    config["data"]["eval"] = {"path": "held_out.jsonl", "prompt": "prompt", "reference": "answer"}
    write_config(home, "config", config)
    done = run_here(home, "grpo", "config.yaml")
    assert done.code == 0, done.err
    return home


def learned(directory: Path, step: int) -> list[Trajectory]:
    return read_trajectories(RunDirectory(directory).trajectories_path(step))


def unlearned(directory: Path, step: int) -> list[int]:
    state = directory / "checkpoints" / f"step-{step:06d}" / "state.json"
    found: list[int] = json.loads(state.read_text())["unlearned"]
    return found


def assert_each_once(directory: Path) -> None:
    """Every prompt that was drawn was learned from in one step, or waits for the next one."""
    places = [
        group
        for step in range(1, STEPS + 1)
        for group in sorted({t.group for t in learned(directory, step)})
    ]
    assert len(places) == STEPS * PROMPTS
    drawn = sorted(places + unlearned(directory, STEPS))
    assert drawn == [*range(len(drawn))]


def test_no_token_is_older_than_the_bound(home: Path) -> None:
    rows = {row["step"]: row for row in metrics(home / "whole")}
    oldest = []
    for step in range(1, STEPS + 1):
        trajectories = learned(home / "whole", step)
        assert len(trajectories) == PROMPTS * RESPONSES
        ages = step - 1 - np.concatenate([t.weight_versions for t in trajectories])
        assert ages.min() >= 0
        assert rows[step]["staleness/max"] == ages.max() <= 1
        assert rows[step]["staleness/mean"] == pytest.approx(ages.mean())
        oldest.append(ages.max())
    assert max(oldest) == 1, "nothing was sampled ahead"
    assert_each_once(home / "whole")
    assert all(row["sync/logprob_gap"] < 1e-4 for row in rows.values() if row["step"])
    assert {row["step"] for row in rows.values() if "eval/reward" in row} == {0, 3, STEPS}


def test_a_replay_learns_the_same(home: Path) -> None:
    words = ("--replay", "whole", "--run.directory", "again", "--run.eval_every", "null")
    done = run_here(home, "grpo", "config.yaml", *words)
    assert done.code == 0, done.err

    def figures(directory: str) -> list[dict[str, Any]]:
        rows = (row for row in metrics(home / directory) if row["step"])
        left_out = (*CLOCKED, "eval/")
        return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in rows]

    assert figures("again") == figures("whole")
    assert "staleness/max" in figures("again")[0]
    before, after = (load_file(home / d / "model/model.safetensors") for d in ("whole", "again"))
    assert all(torch.equal(before[name], after[name]) for name in before | after)


@pytest.mark.slow
def test_a_resumed_run_first_samples_what_was_not_learned_from(home: Path) -> None:
    cut_off(home / "whole", home / "parts", 2)
    waiting = unlearned(home / "whole", 2)
    assert len(waiting) >= PROMPTS
    words = ("--run.directory", "parts", "--run.resume", "must")
    refused = run_here(home, "grpo", "config.yaml", *words, "--rollout.staleness", "0")
    assert refused.code == 2 and f"{len(waiting)} prompts" in refused.err
    done = run_here(home, "grpo", "config.yaml", *words)
    assert done.code == 0, done.err
    assert_each_once(home / "parts")
    first = {t.group for step in (3, 4) for t in learned(home / "parts", step)}
    assert first.issuperset(waiting[:PROMPTS])


@pytest.mark.parametrize("engine", [slow("vllm"), slow("transformers")])
def test_requests_go_on_across_syncs_with_the_log_probs_of_the_trainer(
    tmp_path: Path, engine: str
) -> None:
    """Weights hardly move, so a mistake in what requests keep would show in the log-probs."""
    write_task(tmp_path, vocabulary=256)
    config = copy.deepcopy(CONFIG)
    config["run"] = {"directory": "run", "steps": STEPS}
    config["actor"]["optimizer"] = {"learning_rate": 1e-9}
    config["rollout"] |= {"staleness": 4, "sampling": {"max_new_tokens": 300}}
    config["batch"]["micro_batch_tokens"] = 2000
    if engine == "vllm":
        config["rollout"] |= VLLM | {"vllm": {"cpu_kv_cache_gib": 0.25, "max_sequences": 6}}
    write_config(tmp_path, "config", config)
    done = run_here(tmp_path, "grpo", "config.yaml")
    assert done.code == 0, done.err
    rows = metrics(tmp_path / "run")
    assert max(row["mismatch/abs"] for row in rows) < 1e-4
    assert (max(row["staleness/continued"] for row in rows) > 0) == (engine == "vllm")


GUESSING = {"game": {"name": "guess_number", "max_turns": 3, "max_tokens": 48}}


@pytest.mark.slow
def test_environments_and_dynamic_sampling_go_on_as_well(tmp_path: Path) -> None:
    write_task(tmp_path)
    config = copy.deepcopy(CONFIG)
    config["run"] = {"directory": "run", "steps": 3}
    config["batch"]["dynamic_sampling"] = {"max_drawn": 2.0}
    config["rollout"] |= VLLM | {"sampling": {"max_new_tokens": 8}}
    config["environments"] = GUESSING
    config["data"]["max_tokens"] = 64
    config["batch"]["micro_batch_tokens"] = 800
    write_config(tmp_path, "config", config)
    done = run_here(tmp_path, "grpo", "config.yaml")
    assert done.code == 0, done.err
    rows = metrics(tmp_path / "run")
    assert all(PROMPTS <= row["groups/drawn"] <= 2 * PROMPTS for row in rows)
    assert all(row["episode/turns"] >= 1 and row["staleness/max"] <= 1 for row in rows)
