"""SmolLM2 learns from data: each first loss, gradient and update, and each held-out figure of what
a run leaves, against plain transformers. All in float32, so only the order of sums differs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from choice import slow
from commands import metrics, run, run_here
from peft import PeftModel
from real_cases import (
    ANSWERS,
    HELD_OUT,
    PAIRS,
    base_config,
    chat_tokens,
    load_policy,
    response_logprobs,
    response_sums,
    train,
    write_questions,
)
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)

pytestmark = pytest.mark.real

BETA = 0.1
RATE = 1e-5
RESPONSES = {"prompt": "question", "response": "good"}
ADAPTER = {"rank": 4, "alpha": 8.0}

Rows = list[tuple[str, str, str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with rows; it is removed afterwards, as runs of a real model are large."""
    home = tmp_path_factory.mktemp("real")
    write_questions(home)
    yield home
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def sft(home: Path, smollm2: Path) -> Path:
    """Two steps, each on all rows, of which both are saved."""
    config = base_config("sft", smollm2, RESPONSES, {"sequences": len(ANSWERS)})
    config["run"] |= {"steps": 2, "save_every": 1, "eval_every": 2, "keep_checkpoints": 2}
    train(home, "sft", config)
    return home / "sft"


def mean_loss(model: Any, path: Path, rows: Rows) -> torch.Tensor:
    return -torch.cat([response_logprobs(model, path, q, good) for q, good, _ in rows]).mean()


def test_sft_learns_as_plain_transformers_does(sft: Path, smollm2: Path) -> None:
    rows = metrics(sft)
    model = load_policy(smollm2)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.95), weight_decay=0.0)
    for row in rows:
        optimizer.zero_grad()
        loss = mean_loss(model, smollm2, ANSWERS)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert rows[1]["loss"] < rows[0]["loss"]


def test_the_evaluation_is_that_of_the_saved_model(home: Path, sft: Path, smollm2: Path) -> None:
    loss = mean_loss(load_policy(sft / "model"), smollm2, HELD_OUT).item()
    assert metrics(sft)[-1]["eval/loss"] == pytest.approx(loss, abs=1e-5)
    outcome = run_here(home, "eval", "sft", "--out", "measured")
    assert outcome.code == 0 and f"{loss:.4f}"[:5] in outcome.out


def test_an_export_is_the_saved_model(home: Path, sft: Path, smollm2: Path) -> None:
    outcome = run_here(home, "export", "sft", "--to", "exported")
    assert outcome.code == 0, outcome.err
    saved, exported = (
        load_file(p / "model.safetensors") for p in (sft / "model", home / "exported")
    )
    assert saved.keys() == exported.keys() and "lm_head.weight" not in saved  # the head is tied
    assert all(torch.equal(saved[name], exported[name]) for name in saved)
    template = (smollm2 / "chat_template.jinja").read_text()
    for directory in (sft / "model", home / "exported"):
        assert (directory / "chat_template.jinja").read_text() == template


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_one(home: Path, sft: Path) -> None:
    shutil.copytree(sft, home / "resumed", copy_function=_link_weights)
    shutil.rmtree(home / "resumed" / "model")
    shutil.rmtree(home / "resumed" / "checkpoints" / "step-000002")
    words = ["--run.directory", "resumed", "--run.resume", "auto"]
    outcome = run(home, "sft", "sft.yaml", *words)
    assert outcome.code == 0, outcome.err
    assert metrics(home / "resumed") == metrics(sft)
    saved, again = (load_file(p / "model" / "model.safetensors") for p in (sft, home / "resumed"))
    assert all(torch.equal(saved[name], again[name]) for name in saved)


def _link_weights(source: str, target: str) -> None:
    """Copy a file, but link a large one, which no run writes into."""
    (os.link if os.path.getsize(source) > 2**20 else shutil.copy2)(source, target)


@pytest.mark.slow
def test_dpo_starts_from_its_reference_by_plain_transformers(
    home: Path, sft: Path, smollm2: Path
) -> None:
    config = base_config("dpo", sft / "model", PAIRS, {"pairs": len(ANSWERS)})
    config["reference"] = {"model": {"path": str(smollm2), "dtype": "float32"}}
    config["algorithm"] = {"loss": {"name": "dpo", "options": {"beta": BETA}}}
    [row] = train(home, "dpo", config)
    reference = load_policy(smollm2)

    def margins(policy: Path, rows: Rows) -> torch.Tensor:
        with torch.no_grad():
            good, bad = response_sums(load_policy(policy), smollm2, rows)
            reference_good, reference_bad = response_sums(reference, smollm2, rows)
        return BETA * (good - reference_good - bad + reference_bad)

    first = margins(sft / "model", ANSWERS)
    assert first.abs().max() > 1e-3  # the actor is not its reference
    assert row["loss"] == pytest.approx(-logsigmoid(first).mean().item(), abs=1e-5)
    assert row["rewards/margin"] == pytest.approx(first.mean().item(), abs=2e-5)
    last = margins(home / "dpo" / "model", HELD_OUT)
    assert row["eval/loss"] == pytest.approx(-logsigmoid(last).mean().item(), abs=1e-5)
    assert row["eval/accuracy"] == (last > 0).float().mean().item()


@pytest.mark.slow
def test_kto_weighs_responses_as_plain_transformers_does(
    home: Path, sft: Path, smollm2: Path
) -> None:
    columns = {"prompt": "question", "response": "answer", "label": "is_good"}
    config = base_config("kto", sft / "model", columns, {"sequences": 2 * len(ANSWERS)})
    config["run"] |= {"eval_every": None}
    del config["data"]["eval"]
    config["actor"]["adapter"] = ADAPTER  # which changes nothing at first
    config["reference"] = {"model": {"path": str(smollm2), "dtype": "float32"}}
    config["algorithm"] = {"loss": {"name": "kto", "options": {"beta": BETA}}}
    [row] = train(home, "kto", config)
    following = [*ANSWERS[1:], ANSWERS[0]]
    mismatched = [(q, good, "") for (q, _, _), (_, good, _) in zip(ANSWERS, following, strict=True)]
    with torch.no_grad():
        models = [load_policy(path) for path in (sft / "model", smollm2)]
        [(good, bad), (first_good, first_bad)] = [
            response_sums(m, smollm2, ANSWERS) for m in models
        ]
        other, first_other = (response_sums(m, smollm2, mismatched)[0] for m in models)
    kl = max(0.0, (other - first_other).mean().item())
    gains = torch.cat([good - first_good - kl, kl - (bad - first_bad)])
    assert row["kl"] == pytest.approx(kl, abs=1e-4)
    assert row["loss"] == pytest.approx(1 - torch.sigmoid(BETA * gains).mean().item(), abs=1e-5)


@pytest.mark.slow
def test_the_reward_model_that_is_saved_scores_as_the_evaluation(home: Path, smollm2: Path) -> None:
    [row] = train(home, "rm", base_config("rm", smollm2, PAIRS, {"pairs": len(ANSWERS)}))
    scorer = AutoModelForSequenceClassification.from_pretrained(
        home / "rm" / "model", dtype=torch.float32
    )
    with torch.no_grad():
        scores = [
            [
                scorer(torch.tensor([chat_tokens(smollm2, answers[0], answers[side])[0]])).logits
                for side in (1, 2)
            ]
            for answers in HELD_OUT
        ]
    margin = torch.tensor([(good - bad).item() for good, bad in scores])
    assert margin.abs().min() > 1e-4
    assert row["eval/loss"] == pytest.approx(-logsigmoid(margin).mean().item(), abs=1e-5)
    assert row["eval/accuracy"] == (margin > 0).float().mean().item()


def plain_base(smollm2: Path, quantization: str) -> Any:
    if quantization == "none":
        return load_policy(smollm2)
    return AutoModelForCausalLM.from_pretrained(
        smollm2,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        ),
    )


@pytest.mark.parametrize("quantization", [slow("none"), slow("nf4")])
def test_an_adapter_beside_its_base_and_merged(
    home: Path, smollm2: Path, quantization: str
) -> None:
    """The evaluation, PEFT's adapter beside the base, and the merged model give one loss."""
    name = f"adapter-{quantization}"
    config = base_config(name, smollm2, RESPONSES, {"sequences": len(ANSWERS)})
    config["actor"] |= {"adapter": ADAPTER, "optimizer": {"learning_rate": 0.01}}
    config["actor"]["model"]["quantization"] = quantization
    [row] = train(home, "sft", config)
    base = plain_base(smollm2, quantization)
    with torch.no_grad():
        assert row["loss"] == pytest.approx(mean_loss(base, smollm2, ANSWERS).item(), abs=1e-5)
        before = mean_loss(base, smollm2, HELD_OUT).item()
        adapted = PeftModel.from_pretrained(base, home / name / "model")
        beside = mean_loss(adapted, smollm2, HELD_OUT).item()
    assert abs(beside - before) > 0.01 and row["eval/loss"] == pytest.approx(beside, abs=1e-5)
    words = ["--out", f"{name}-merged", "--dtype", "float32", "--quantization", quantization]
    outcome = run_here(home, "merge", f"{name}/model", *words)
    assert outcome.code == 0, outcome.err
    with torch.no_grad():
        merged = mean_loss(load_policy(home / f"{name}-merged"), smollm2, HELD_OUT).item()
    assert merged == pytest.approx(beside, abs=1e-4)
