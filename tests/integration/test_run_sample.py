"""The rollout half alone, and what SFT, DPO and a replay learn from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import PPO, SFT, metrics, run_here, write_config, write_task

from plimsoll.run.directory import RunDirectory
from plimsoll.run.trajectories import read_trajectories

STEPS, PROMPTS, RESPONSES = 2, 4, 16
BATCH = {"prompts": PROMPTS, "responses": RESPONSES, "micro_batch_tokens": 60}
LEFT_OUT = ("run", "batch", "critic", "algorithm")
CONFIG: dict[str, Any] = {key: value for key, value in PPO.items() if key not in LEFT_OUT} | {
    "run": {"directory": "sampled", "steps": STEPS},
    "batch": BATCH,
    "rewards": {"even": {"name": "pattern", "options": {"pattern": "[02468]"}}},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with sampled responses."""
    home = tmp_path_factory.mktemp("sample")
    write_task(home)
    write_config(home, "sample", CONFIG)
    done = run_here(home, "sample", "sample.yaml")
    assert done.code == 0, done.err
    found = RunDirectory(home / "sampled")
    best, pairs = rows_of(found.best_path), rows_of(found.pairs_path)
    assert f"best response of {len(best)} of 8 groups" in done.out
    assert f"the best and worst of {len(pairs)} of 8 groups" in done.out
    return home


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(run: Path) -> list[tuple[int, int, str, float]]:
    files = RunDirectory(run).trajectories().values()
    found = [t for path in files for t in read_trajectories(path)]
    return [(t.prompt.index, t.group, t.response_text, t.reward) for t in found]


def test_it_writes_what_a_run_that_learns_would_sample_first(home: Path) -> None:
    assert len(answers(home / "sampled")) == STEPS * PROMPTS * RESPONSES
    flags = "--run.directory", "learned", "--run.steps", "1", "--algorithm.mini_batches", "1"
    done = run_here(home, "reinforce_pp", "sample.yaml", *flags)
    assert done.code == 0, done.err
    first = answers(home / "learned")
    assert first == answers(home / "sampled")[: len(first)]
    assert not (home / "sampled" / "model").exists()


def test_best_and_pairs_are_of_the_groups_that_were_sampled(home: Path) -> None:
    run = RunDirectory(home / "sampled")
    best, pairs = rows_of(run.best_path), rows_of(run.pairs_path)
    assert best
    assert pairs
    rewards: dict[str, list[float]] = {}
    for path in run.trajectories().values():
        for t in read_trajectories(path):
            if t.finish_reason == "stop" and t.response_text.strip():
                rewards.setdefault(t.prompt.text, []).append(t.reward)
    assert {row["prompt"]: row["reward"] for row in best} == {
        prompt: max(own) for prompt, own in rewards.items()
    }
    for row in pairs:
        own = rewards[row["prompt"]]
        assert (row["chosen_reward"], row["rejected_reward"]) == (max(own), min(own))
        assert row["chosen_reward"] > row["rejected_reward"]


def test_it_goes_on_after_the_last_step_that_was_written(home: Path) -> None:
    part, whole = home / "part", home / "sampled"
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints" / "step-000002")
    (part / "best.jsonl").unlink()
    flags = "--run.directory", "part", "--run.resume", "must"
    done = run_here(home, "sample", "sample.yaml", *flags)
    assert done.code == 0, done.err
    assert "resumed after step 1" in done.out
    assert answers(part) == answers(whole)
    assert metrics(part) == metrics(whole)
    for name in ("best.jsonl", "pairs.jsonl"):
        assert (part / name).read_text() == (whole / name).read_text()


def test_sft_dpo_and_a_replay_learn_from_it(home: Path) -> None:
    source = {"path": "sampled/best.jsonl", "prompt": "prompt", "response": "response"}
    data = {"train": source, "chat_template": "none", "max_tokens": 24}
    batch = {"sequences": 2, "micro_batch_tokens": 64}
    run = {"directory": "sft", "steps": 2}
    write_config(home, "sft", {**SFT, "run": run, "data": data, "batch": batch})
    done = run_here(home, "sft", "sft.yaml")
    assert done.code == 0, done.err
    pairs = {"path": "sampled/pairs.jsonl", "prompt": "prompt"}
    pairs |= {"chosen": "chosen", "rejected": "rejected"}
    dpo = {key: SFT[key] for key in ("cluster", "actor")} | {
        "run": {"directory": "dpo", "steps": 2},
        "data": data | {"train": pairs},
        "batch": {"pairs": 2, "micro_batch_tokens": 64},
    }
    write_config(home, "dpo", dpo)
    done = run_here(home, "dpo", "dpo.yaml")
    assert done.code == 0, done.err
    flags = "--run.directory", "replayed", "--replay", "sampled"
    done = run_here(home, "grpo", "sample.yaml", *flags)
    assert done.code == 0, done.err
    assert answers(home / "replayed") == answers(home / "sampled")
    assert [len(metrics(home / name)) for name in ("sft", "dpo", "replayed")] == [2, 2, 2]


def test_its_plan_has_engines_and_nothing_that_learns(home: Path) -> None:
    flags = "--run.directory", "planned"
    told = run_here(home, "sample", "sample.yaml", "--dry-run", *flags)
    assert told.code == 0, told.err
    plan = json.loads((home / "sampled" / "plan.json").read_text())
    assert {item["phase"] for item in plan["items"]} == {"load", "rollout"}
    assert {item["role"] for item in plan["items"]} == {"process", "rollout"}


ASLEEP = ("--rollout.vllm.sleep_level", "1", "--rollout.transformers", "null")


@pytest.mark.parametrize("flags", [("--rollout.replay", "x"), ASLEEP])
def test_what_only_a_run_that_learns_can_follow_is_refused(
    home: Path, flags: tuple[str, ...]
) -> None:
    done = run_here(home, "sample", "sample.yaml", "--run.directory", "refused", *flags)
    assert done.code == 4
    assert flags[0][2:] in done.err


def test_it_has_no_model_to_export_and_its_actor_is_looked_at(home: Path) -> None:
    done = run_here(home, "export", "sampled", "--to", "exported")
    assert done.code == 2
    assert "which trains nothing" in done.err
    flags = "--run.directory", "refused", "--actor.model.path", "nowhere/model"
    done = run_here(home, "sample", "sample.yaml", *flags)
    assert done.code == 2
    assert "actor.model.path" in done.err


def test_an_evaluation_of_it_measures_the_actor(home: Path) -> None:
    done = run_here(home, "eval", "sampled", "--model", "model", "--out", "measured")
    assert done.code == 0, done.err
    assert json.loads((home / "measured" / "eval.json").read_text())["rows"] == 4
