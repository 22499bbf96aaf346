"""`plimsoll rm` and `plimsoll prm` as a user starts them: what is learned, what is saved, and that
transformers and PPO read the same scores from it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from commands import PPO, Outcome, column, cut_off, metrics, run, run_here, write_config, write_task
from safetensors.torch import load_file
from test_run_pairs import DPO, write_pairs
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

STEPS = 30


def rm_config() -> dict[str, Any]:
    config = copy.deepcopy(DPO)
    config["run"] = {"directory": "rm", "steps": STEPS, "save_every": 25, "eval_every": 15}
    config["algorithm"] = {"centring": 0.01}
    return config


def prm_config() -> dict[str, Any]:
    config = rm_config()
    config["run"] |= {"directory": "prm"}
    columns = {"prompt": "prompt", "steps": "steps", "labels": "labels"}
    config["data"] |= {
        "train": {"path": "steps.jsonl"} | columns,
        "eval": {"path": "held_out_steps.jsonl"} | columns,
        "step_separator": "",
    }
    config["batch"] = {"sequences": 12, "micro_batch_tokens": 80}
    del config["algorithm"]
    return config


def write_steps(path: Path, count: int, seed: int) -> None:
    """Steps of one digit and a sign: right with `#`, wrong with `+`."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        signs = rng.integers(2, size=rng.integers(1, 4))
        steps = [f"{rng.integers(10)}{'+#'[sign]}" for sign in signs]
        rows.append({"prompt": "1+1=", "steps": steps, "labels": [bool(s) for s in signs]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer pads with a token of its own, unlike the one that ends a response."""
    home = tmp_path_factory.mktemp("reward")
    write_task(home)
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(home / "model")
    write_pairs(home / "pairs.jsonl", 200, seed=0)
    write_pairs(home / "held_out.jsonl", 50, seed=1)
    write_steps(home / "steps.jsonl", 200, seed=0)
    write_steps(home / "held_out_steps.jsonl", 50, seed=1)
    write_config(home, "rm", rm_config())
    write_config(home, "prm", prm_config())
    return home


@pytest.fixture(scope="module")
def whole(home: Path) -> Outcome:
    """A run from start to end."""
    return run_here(home, "rm", "rm.yaml")


def held_out_pairs(home: Path) -> list[list[str]]:
    lines = (home / "held_out.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [[row["prompt"] + row[name] for row in rows] for name in ("chosen", "rejected")]


def test_held_out_accuracy_rises_well_above_chance(home: Path, whole: Outcome) -> None:
    assert whole.code == 0, whole.err
    rows = metrics(home / "rm")
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=0.05)  # scores begin near 0
    last = rows[-1]
    assert last["eval/accuracy_low"] > 0.85 and last["eval/loss"] < 0.4
    assert 0 <= last["eval/calibration_error"] < 0.5
    assert last["eval/loss"] == pytest.approx(
        last["eval/reward_loss"] + 0.01 * last["eval/off_centre"]
    )
    assert [row["step"] for row in rows if "eval/loss" in row] == [15, 30]
    assert (home / "rm" / "calibration.svg").read_text().startswith("<svg")
    assert run_here(home, "report", "rm").code == 0
    assert "data:image/svg+xml;base64," in (home / "rm" / "report.html").read_text()
    assert_measured_alike(home, "rm")


def test_transformers_gives_the_same_scores_one_by_one_and_padded(
    home: Path, whole: Outcome
) -> None:
    assert whole.code == 0
    tokenizer = AutoTokenizer.from_pretrained(home / "rm" / "model")
    model = AutoModelForSequenceClassification.from_pretrained(
        home / "rm" / "model", dtype=torch.float32
    )
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    scores = []
    for texts in held_out_pairs(home):
        ended = [text + tokenizer.eos_token for text in texts]
        with torch.no_grad():
            batch = tokenizer(ended, padding=True, return_tensors="pt", padding_side="right")
            together = model(**batch).logits[:, 0]
            alone = [model(**tokenizer(t, return_tensors="pt")).logits[0, 0] for t in ended]
        assert torch.allclose(together, torch.stack(alone), atol=1e-4)
        scores.append(together)
    margin = scores[0] - scores[1]
    last = metrics(home / "rm")[-1]
    assert last["eval/rewards/margin"] == pytest.approx(margin.mean().item(), rel=1e-4)
    assert last["eval/rewards/chosen"] == pytest.approx(scores[0].mean().item(), rel=1e-4)
    assert last["eval/accuracy"] == pytest.approx((margin > 0).float().mean().item())


def test_a_resumed_run_is_the_run_that_was_never_stopped(home: Path, whole: Outcome) -> None:
    cut_off(home / "rm", home / "again", 25)
    resumed = run_here(home, "rm", "rm.yaml", "--run.directory", "again", "--run.resume", "must")
    assert (whole.code, resumed.code) == (0, 0), resumed.err
    assert "resumed after step 25" in resumed.out
    assert metrics(home / "again") == metrics(home / "rm")
    a, b = (load_file(home / d / "model" / "model.safetensors") for d in ("rm", "again"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_ppo_takes_it_as_its_reward_model(home: Path, whole: Outcome) -> None:
    assert whole.code == 0
    config = copy.deepcopy(PPO)
    config["run"] |= {"steps": 1, "save_every": None, "eval_every": None}
    del config["data"]["eval"]
    judge = {"path": "rm/model", "dtype": "float32"}
    write_config(home, "ppo", config | {"reward_model": {"role": {"model": judge}}})
    outcome = run_here(home, "ppo", "ppo.yaml")
    assert outcome.code == 0, outcome.err
    model = AutoModelForSequenceClassification.from_pretrained(
        home / "rm" / "model", dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    rows = parquet.read_table(home / "ppo" / "trajectories" / "step-000001.parquet").to_pylist()
    for row in rows:
        tokens = torch.tensor([[*tokenizer.encode(row["prompt"]), *row["tokens"]]])
        with torch.no_grad():
            score = model(tokens).logits[0, 0].item()
        assert row["reward_reward_model"] == pytest.approx(score, abs=1e-4)


def test_a_process_reward_model_scores_each_step(home: Path) -> None:
    outcome = run(home, "prm", "prm.yaml")
    assert (outcome.code, outcome.err) == (0, "")
    last = metrics(home / "prm")[-1]
    assert last["eval/accuracy"] > 0.9 > 0.6 > last["eval/labels"]
    assert column(metrics(home / "prm"), "eval/loss")[-1] < 0.5
    assert (home / "prm" / "calibration.svg").is_file()

    saved = home / "prm" / "model"
    tokenizer = AutoTokenizer.from_pretrained(saved)
    whole = AutoModelForSequenceClassification.from_pretrained(saved, dtype=torch.float32)
    each = AutoModelForTokenClassification.from_pretrained(saved, dtype=torch.float32).eval()
    losses, right = [], []
    for line in (home / "held_out_steps.jsonl").read_text().splitlines():
        row = json.loads(line)
        parts = [tokenizer.encode(text) for text in (row["prompt"], *row["steps"])]
        ends = np.cumsum([len(part) for part in parts])[1:] - 1
        tokens = torch.tensor([[token for part in parts for token in part]])
        with torch.no_grad():
            scores = each(tokens).logits[0, ends, 0]
            last_score = whole(tokens).logits[0, 0]
        assert scores[-1].item() == pytest.approx(last_score.item(), abs=1e-5)
        labels = torch.tensor(row["labels"], dtype=torch.float32)
        losses += (torch.log1p(torch.exp(scores)) - labels * scores).tolist()
        right += ((scores > 0) == (labels > 0.5)).tolist()
    assert last["eval/loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert last["eval/accuracy"] == pytest.approx(np.mean(right))
    assert_measured_alike(home, "prm")


def assert_measured_alike(home: Path, directory: str) -> None:
    """`plimsoll eval` finds of the run's model what the run's last evaluation found."""
    assert run_here(home, "eval", directory).code == 0
    found = json.loads((home / directory / "eval.json").read_text())
    seen = {n: x for n, x in metrics(home / directory)[-1].items() if n.startswith("eval/")}
    assert {n: found[n.removeprefix("eval/")] for n in seen} == pytest.approx(seen, rel=1e-4)
    assert (home / directory / "eval-calibration.svg").read_text().startswith("<svg")
