"""`plimsoll distill` as a user starts it: a student comes nearer to its teacher."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import (
    SFT,
    Outcome,
    assert_reported,
    column,
    metrics,
    run_here,
    write_config,
    write_task,
)
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from plimsoll.commands.demo import make_tokenizer
from plimsoll.model.tiny import tiny_config, write_tiny_model

DISTILL: dict[str, Any] = {
    **copy.deepcopy(SFT),
    "run": {"directory": "one", "steps": 8, "eval_every": 8},
    "teacher": {"model": {"path": "teacher", "dtype": "float32"}},
    "algorithm": {"temperature": 2.0, "nll_share": 0.1},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The teacher is wider than the student, has a head of its own, and padding in it."""
    home = tmp_path_factory.mktemp("distill")
    write_task(home)
    wide = tiny_config("qwen2", False, vocab=40, hidden=96, heads=2, feed_forward=96)
    write_tiny_model(home / "teacher", wide, 1, make_tokenizer())
    weights = load_file(home / "teacher" / "model.safetensors")
    weights["lm_head.weight"] *= 10  # a teacher that is sure of something
    save_file(weights, home / "teacher" / "model.safetensors", metadata={"format": "pt"})
    return home


@pytest.fixture(scope="module")
def one(home: Path) -> Outcome:
    write_config(home, "distill", DISTILL)
    return run_here(home, "distill", "distill.yaml")


def test_a_student_comes_nearer_to_its_teacher(home: Path, one: Outcome) -> None:
    assert one.code == 0, one.err
    rows = metrics(home / "one")
    divergences = column(rows, "divergence")
    assert divergences[-1] < 0.7 * divergences[0]
    for row in rows:
        share, soft = row["nll"] * 0.1, row["divergence"] * 0.9 * 4
        assert row["loss"] == pytest.approx(share + soft, rel=1e-5)
    last = rows[-1]
    assert last["eval/perplexity"] == pytest.approx(np.exp(last["eval/nll"]))
    assert last["eval/divergence"] < divergences[0]
    assert (home / "one" / "model" / "model.safetensors").is_file()
    assert_reported(home / "one")


def test_an_adapter_learns_from_the_teacher(home: Path, one: Outcome) -> None:
    """It begins as the whole student begins; what is saved is, in transformers and PEFT, as far
    from the teacher as the run's last evaluation says."""
    config = copy.deepcopy(DISTILL)
    config["run"] = {"directory": "lora", "steps": 24, "eval_every": 24}
    config["actor"]["adapter"] = {"rank": 8, "alpha": 32.0}
    write_config(home, "lora", config)
    assert run_here(home, "distill", "lora.yaml").code == 0
    rows = metrics(home / "lora")
    divergences = column(rows, "divergence")
    assert one.code == 0 and divergences[0] == pytest.approx(metrics(home / "one")[0]["divergence"])
    assert divergences[-1] < 0.9 * divergences[0]

    base = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    student = PeftModel.from_pretrained(base, home / "lora" / "model").eval()
    teacher = AutoModelForCausalLM.from_pretrained(home / "teacher", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    divergence, nll = [], []
    for line in (home / "held_out.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt, answer = (tokenizer.encode(row[name]) for name in ("prompt", "response"))
        answer.append(tokenizer.eos_token_id)
        tokens = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            own, from_teacher = (
                model(tokens).logits[0, len(prompt) - 1 : -1, :32] for model in (student, teacher)
            )
        p, q = (from_teacher / 2).log_softmax(-1), (own / 2).log_softmax(-1)
        divergence += (p.exp() * (p - q)).sum(-1).tolist()
        nll += torch.nn.functional.cross_entropy(
            own, torch.tensor(answer), reduction="none"
        ).tolist()
    assert rows[-1]["eval/divergence"] == pytest.approx(np.mean(divergence), rel=1e-4)
    assert rows[-1]["eval/nll"] == pytest.approx(np.mean(nll), rel=1e-4)
    merge = ("merge", "lora/model", "--out", "merged", "--dtype", "float32")
    assert run_here(home, *merge).code == 0
    assert run_here(home, "eval", "lora", "--model", "merged").code == 0
    found = json.loads((home / "lora" / "eval.json").read_text())
    assert found["nll"] == pytest.approx(np.mean(nll), rel=1e-4)


def test_a_teacher_of_other_tokens_is_refused(home: Path) -> None:
    small = tiny_config("qwen2", True, vocab=24, hidden=64, heads=2, feed_forward=96)
    write_tiny_model(home / "small", small, 2, make_tokenizer())
    write_config(home, "refused", DISTILL)
    flags = ["--run.directory", "other", "--teacher.model.path", "small"]
    refused = run_here(home, "distill", "refused.yaml", *flags)
    assert refused.code == 4 and "vocabulary" in refused.err
