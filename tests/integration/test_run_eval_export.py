"""`plimsoll eval` against sums by hand and by transformers; `plimsoll export` against what the run
saved and what PEFT merges. In this process, on a model of random weights and one short run.
"""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from commands import PPO, SFT, write_config, write_task
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_run_pairs import DPO, write_pairs
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from plimsoll.cli.command import main

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("eval")
    write_task(home)
    write_pairs(home / "pairs.jsonl", 20, seed=1)
    return home


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(home)
    yield


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_job(home: Path, job: str, config: dict[str, Any]) -> None:
    path = write_config(home, job, config)
    path.write_text(f"# {job}\n{path.read_text()}")


def evaluated(home: Path, *words: str) -> dict[str, Any]:
    assert main(["eval", *words, "--out", "measured"]) == 0
    found: dict[str, Any] = json.loads((home / "measured" / "eval.json").read_text())
    return found


def test_the_likelihood_is_that_of_transformers(home: Path) -> None:
    write_config(home, "sft", SFT)
    found = evaluated(home, "sft.yaml")
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    model = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    total, tokens = 0.0, 0
    for row in rows_of(home / "held_out.jsonl"):
        prompt, answer = (tokenizer(row[key])["input_ids"] for key in ("prompt", "response"))
        answer = [*answer, tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        total += float(
            torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
        )
        tokens += len(answer)
    assert (found["model"], found["rows"], found["tokens"]) == ("model", 4, tokens)
    assert found["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)


def write_renumbered(home: Path) -> None:
    """The same model, of which two tokens have changed their numbers and so their rows."""
    shutil.copytree(home / "model", home / "renumbered")
    tokenizer, weights = (home / "renumbered" / name for name in ("tokenizer.json", WEIGHTS))
    one, other = (AutoTokenizer.from_pretrained(home / "model").get_vocab()[x] for x in "37")
    text = tokenizer.read_text().replace(f'"3": {one}', f'"3": {other}')
    tokenizer.write_text(text.replace(f'"7": {other}', f'"7": {one}'))
    tensors = load_file(weights)
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
        tensors[name][[one, other]] = tensors[name][[other, one]]
    save_file(tensors, weights, {"format": "pt"})


def test_another_model_is_read_by_its_own_tokenizer(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_renumbered(home)
    write_config(home, "sft", SFT)
    found = evaluated(home, "sft.yaml", "--model", "renumbered")
    assert found["loss"] == pytest.approx(evaluated(home, "sft.yaml")["loss"], rel=1e-5)
    write_job(home, "dpo", DPO)
    assert main(["eval", "dpo.yaml", "--model", "renumbered"]) == 2
    assert re.search(r"renumbered.*\btokenizer\b", capsys.readouterr().err)


def test_a_model_that_is_its_reference_prefers_nothing(home: Path) -> None:
    config = copy.deepcopy(DPO)
    config["data"]["eval"]["path"] = "pairs.jsonl"
    write_job(home, "dpo", config)
    found = evaluated(home, "dpo.yaml")
    assert found["loss"] == pytest.approx(math.log(2)) and found["rows"] == 20
    assert found["accuracy"] == 0.5
    assert found["accuracy_low"] < 0.5 < found["accuracy_high"]


def test_the_accuracy_of_a_reward_model_is_that_of_transformers_scores(home: Path) -> None:
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_pretrained(home / "model", num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    scorer.save_pretrained(home / "scorer")
    tokenizer.save_pretrained(home / "scorer")
    config = {k: v for k, v in copy.deepcopy(DPO).items() if k != "algorithm"}
    config["data"]["eval"]["path"] = "pairs.jsonl"
    write_job(home, "rm", config)
    found = evaluated(home, "rm.yaml", "--model", "scorer")
    scorer.config.pad_token_id = None  # else the token that ends a response would be looked past
    right = []
    for row in rows_of(home / "pairs.jsonl"):
        ends = [tokenizer.eos_token_id]
        tokens = [
            tokenizer(row["prompt"])["input_ids"] + tokenizer(row[side])["input_ids"] + ends
            for side in ("chosen", "rejected")
        ]
        with torch.no_grad():
            better, worse = (float(scorer(torch.tensor([t])).logits) for t in tokens)
        right.append(better > worse)
    assert found["accuracy"] == pytest.approx(sum(right) / len(right))
    assert 0 < found["accuracy"] < 1


def test_answers_are_sampled_judged_and_kept(home: Path) -> None:
    write_config(home, "ppo", PPO)
    found = evaluated(home, "ppo.yaml")
    answers = pq.read_table(home / "measured" / "eval-answers.parquet").to_pylist()
    prompts = [row["prompt"] for row in rows_of(home / "held_out.jsonl")]
    assert [answer["prompt"] for answer in answers] == prompts
    right = [answer["response"].strip() == answer["reference"] for answer in answers]
    assert found["answer"] == sum(right) / len(right)
    assert found["answer_low"] <= found["answer"] <= found["answer_high"]
    assert found["reward"] == pytest.approx(sum(a["reward"] for a in answers) / len(answers))


def test_a_run_with_an_adapter_is_exported_and_measured(home: Path) -> None:
    config = copy.deepcopy(SFT)
    config["run"] = {"directory": "lora", "steps": 2}
    config["actor"]["adapter"] = {"rank": 4, "alpha": 8.0}
    write_config(home, "lora", config)
    assert main(["sft", "lora.yaml"]) == 0

    assert main(["export", "lora", "--to", "adapter"]) == 0
    saved = load_file(home / "lora" / "model" / "adapter_model.safetensors")
    written = load_file(home / "adapter" / "adapter_model.safetensors")
    assert written.keys() == saved.keys()
    assert all(torch.equal(written[name], saved[name]) for name in saved)

    assert main(["export", "lora/checkpoints/step-000002", "--to", "merged", "--merge"]) == 0
    base = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, home / "adapter").merge_and_unload().state_dict()
    ours = load_file(home / "merged" / "model.safetensors")
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-7)
    assert main(["export", "lora", "--to", "narrow", "--merge", "--dtype", "bfloat16"]) == 0
    narrow = load_file(home / "narrow" / "model.safetensors")
    for name, tensor in narrow.items():
        assert torch.equal(tensor, ours[name].bfloat16())

    measured = evaluated(home, "lora", "--model", "merged")["loss"]
    alone = evaluated(home, "lora")
    assert alone["loss"] == measured and alone["model"] == "lora/model"
    assert not [*(home / "lora").glob(".merged-*")]
    over_4_bits = ("--actor.model.quantization", "nf4")
    assert measured == evaluated(home, "lora", "--model", "merged", *over_4_bits)["loss"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("export model --to x", "neither a run with a checkpoint"),
        ("export lora --to model", "--to model is there already"),
        ("export lora --to ~/model", "/model is there already"),
        ("merge model --out new", "is no adapter"),
        ("eval sft.yaml --data.eval.path gone.jsonl", "gone.jsonl"),
        ("eval lora", "no final model"),
        ("eval runs/lora", "no run.directory 'runs/lora'"),
        ("eval stf.yaml", "Nearest: sft.yaml"),
    ],
)
def test_what_cannot_be_is_said(
    home: Path,
    words: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(home))
    write_config(home, "sft", SFT)
    if words == "eval lora":
        (home / "begun").mkdir()
        (home / "begun" / "config.yaml").write_text("# sft\n" + (home / "sft.yaml").read_text())
        words = "eval begun"
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err
