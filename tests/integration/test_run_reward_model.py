"""A reward model as a part of the reward in PPO: its scores are those of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch
from commands import PPO, assert_reported, metrics, run_here, write_config, write_task
from transformers import AutoModelForSequenceClassification

from plimsoll.model.load import load_tokenizer
from plimsoll.model.value import initialise_score


def scored_ppo(directory: str, **role: Any) -> dict[str, Any]:
    config = copy.deepcopy(PPO)
    config["run"] |= {"directory": directory, "steps": 1, "eval_every": 1, "save_every": None}
    config["reward_model"] = {"role": {"model": {"path": "judge"}} | role, "weight": 3.0}
    return config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a reward model, `judge`, whose scores are far from 0."""
    home = tmp_path_factory.mktemp("judged")
    write_task(home)
    judge = AutoModelForSequenceClassification.from_pretrained(home / "model", num_labels=1)
    initialise_score(judge.score, seed=1)
    with torch.no_grad():
        judge.score.weight.mul_(100)
    judge.save_pretrained(home / "judge")
    return home


def test_the_score_is_that_of_transformers_at_the_last_token(home: Path) -> None:
    write_config(home, "judged", scored_ppo("judged", stage=3))
    outcome = run_here(home, "ppo", "judged.yaml")
    assert outcome.code == 0, outcome.err
    table = parquet.read_table(home / "judged" / "trajectories" / "step-000001.parquet").to_pylist()
    judge = AutoModelForSequenceClassification.from_pretrained(
        home / "judge", num_labels=1, dtype=torch.bfloat16
    ).float()  # the run's weights, without its rounding
    tokenizer = load_tokenizer(str(home / "model"))
    scores = []
    for row in table:
        prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
        tokens = torch.tensor([[*prompt, *row["tokens"]]])
        with torch.no_grad():
            hidden = judge.model(tokens).last_hidden_state[0, -1]
            scores.append(float(hidden.float() @ judge.score.weight[0].float()))
        assert row["reward_reward_model"] == pytest.approx(scores[-1], abs=0.2)
    assert max(scores) - min(scores) > 0.5
    first, last = metrics(home / "judged")
    assert last["reward/reward_model"] == pytest.approx(sum(scores) / len(scores), abs=0.05)
    parts = last["reward/answer"] + 0.1 * last["reward/length"] + 3 * last["reward/reward_model"]
    assert last["reward"] == pytest.approx(parts, rel=1e-5)
    assert "eval/reward_model" in first
    assert_reported(home / "judged")


def test_a_model_without_a_score_head_is_refused(home: Path) -> None:
    config = scored_ppo("headless")
    config["reward_model"]["role"]["model"]["path"] = "model"
    write_config(home, "headless", config)
    outcome = run_here(home, "ppo", "headless.yaml")
    assert outcome.code == 2
    assert "has no head that gives scores" in outcome.err


def test_several_models_score_each_with_its_own_tokenizer(home: Path) -> None:
    """A reward model that reads tokens of its own making, and a process reward model."""
    tokenizer = load_tokenizer(str(home / "model"))
    tokenizer.save_pretrained(home / "judge")
    own = {"role": {"model": {"path": "judge"}}, "tokenizer": "own", "chat_template": "none"}
    config = scored_ppo("several")
    del config["reward_model"]
    config["reward_models"] = {
        "whole": {**own, "weight": 2.0},
        "steps": {**own, "steps": {"separator": " ", "take": "mean"}},
    }
    write_config(home, "several", config)
    outcome = run_here(home, "ppo", "several.yaml")
    assert outcome.code == 0, outcome.err
    table = parquet.read_table(home / "several" / "trajectories" / "step-000001.parquet")
    judge = AutoModelForSequenceClassification.from_pretrained(
        home / "judge", num_labels=1, dtype=torch.bfloat16
    ).float()

    def scores(tokens: list[int]) -> Any:
        with torch.no_grad():
            hidden = judge.model(torch.tensor([tokens])).last_hidden_state[0]
            return hidden.float() @ judge.score.weight[0].float()

    def encoded(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    for row in table.to_pylist():
        whole = [*encoded(row["prompt"]), *encoded(row["response"]), tokenizer.eos_token_id]
        assert row["reward_whole"] == pytest.approx(float(scores(whole)[-1]), abs=0.2)
        assert 0 <= row["reward_steps"] <= 1
        tokens, ends = encoded(row["prompt"]), []
        for i, step in enumerate(p for p in row["response"].split(" ") if p.strip()):
            tokens += encoded(f" {step}" if i else step)
            ends.append(len(tokens) - 1)
        if ends:
            found = torch.sigmoid(scores(tokens)[ends]).mean()
            assert row["reward_steps"] == pytest.approx(float(found), abs=0.1)
    assert_reported(home / "several")


def test_settings_of_a_tokenizer_that_is_not_its_own_are_refused(home: Path) -> None:
    config = scored_ppo("steps")
    config["reward_model"]["steps"] = {"separator": " "}
    write_config(home, "steps", config)
    outcome = run_here(home, "ppo", "steps.yaml")
    assert outcome.code == 4
    assert "reward-tokenizer" in outcome.err


def test_scores_are_sampled_alone_and_replayed_without_the_model(home: Path) -> None:
    config = scored_ppo("scored")
    config["run"]["eval_every"] = None
    write_config(home, "scored", config)
    for words in (
        ("sample", "scored.yaml"),
        ("ppo", "scored.yaml", "--run.directory", "live"),
        ("ppo", "scored.yaml", "--run.directory", "replayed", "--replay", "scored"),
    ):
        outcome = run_here(home, *words)
        assert outcome.code == 0, outcome.err
    (scored,), (live,), (replayed,) = (metrics(home / n) for n in ("scored", "live", "replayed"))
    assert scored["reward/reward_model"] == live["reward/reward_model"]
    assert replayed == {name: live[name] for name in replayed}
    flags = "--run.directory", "planned", "--replay", "scored", "--dry-run"
    told = run_here(home, "ppo", "scored.yaml", *flags).out
    assert "judge" not in told.partition("Processes")[2]
