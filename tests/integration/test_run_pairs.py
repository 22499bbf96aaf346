"""`plimsoll dpo` as a user starts it: it learns what is preferred, and goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from choice import slow
from commands import Outcome, column, cut_off, metrics, run_here, write_config, write_task
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 60
DPO: dict[str, Any] = {
    "run": {"directory": "dpo", "steps": STEPS, "save_every": 25, "eval_every": 20},
    "cluster": {"where": "local", "threads": 1},
    "data": {
        "train": {
            "path": "pairs.jsonl",
            "prompt": "prompt",
            "chosen": "chosen",
            "rejected": "rejected",
        },
        "eval": {
            "path": "held_out.jsonl",
            "prompt": "prompt",
            "chosen": "chosen",
            "rejected": "rejected",
        },
        "chat_template": "none",
        "max_tokens": 16,
    },
    "batch": {"pairs": 12, "micro_batch_tokens": 80},
    "actor": {
        "model": {"path": "model", "dtype": "float32"},
        "optimizer": {"learning_rate": 0.003, "schedule": "cosine", "warmup_steps": 2},
    },
    "algorithm": {"loss": {"name": "dpo", "options": {"beta": 0.5}}},
}


def write_pairs(path: Path, count: int, seed: int) -> None:
    """Answers of two digits: better joined by `#` than by `+`, whatever the digits are."""
    rng = np.random.default_rng(seed)
    rows = []
    for a, b, c, d in rng.integers(10, size=(count, 4)):
        digits = [str(x) for x in rng.integers(10, size=rng.integers(1, 4))]
        tail = "".join(digits)
        row = {"prompt": f"{a}+{b}=", "chosen": f" {c}#{tail}", "rejected": f" {d}+{tail}"}
        rows.append(json.dumps(row) + "\n")
    path.write_text("".join(rows))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("pairs")
    write_task(home)
    write_pairs(home / "pairs.jsonl", 200, seed=0)
    write_pairs(home / "held_out.jsonl", 50, seed=1)
    write_config(home, "dpo", DPO)
    return home


@pytest.fixture(scope="module")
def whole(home: Path) -> Outcome:
    """A run from start to end."""
    return run_here(home, "dpo", "dpo.yaml")


def test_held_out_accuracy_rises_well_above_chance(home: Path, whole: Outcome) -> None:
    assert whole.code == 0, whole.err
    rows = metrics(home / "dpo")
    # At the first step actor and reference are the same model: nothing is preferred.
    assert rows[0]["accuracy"] == pytest.approx(0.5) and rows[0]["rewards/margin"] == 0
    assert rows[0]["loss"] == pytest.approx(np.log(2))
    last = rows[-1]
    assert last["eval/accuracy_low"] > 0.85
    assert last["eval/accuracy_low"] < last["eval/accuracy"] <= last["eval/accuracy_high"] + 1e-9
    assert last["eval/rewards/margin"] > 1 and last["eval/loss"] < 0.5
    assert [row["step"] for row in rows if "eval/loss" in row] == [20, 40, 60]
    kept = sorted(path.name for path in (home / "dpo" / "checkpoints").iterdir())
    assert kept == ["step-000050", "step-000060"]


def plain_sums(model: Any, tokenizer: Any, prompt: str, response: str) -> torch.Tensor:
    """The log-prob of a response and the token that ends it."""
    start = tokenizer.encode(prompt)
    tokens = torch.tensor([*start, *tokenizer.encode(response), tokenizer.eos_token_id])
    with torch.no_grad():
        logp_TV = model(tokens[None]).logits[0, :-1].float().log_softmax(-1)
    total: torch.Tensor = logp_TV.gather(1, tokens[1:, None])[len(start) - 1 :].sum()
    return total


def test_the_evaluation_is_that_of_the_saved_model(home: Path, whole: Outcome) -> None:
    """Computed again by transformers, row by row, against the first model."""
    assert whole.code == 0
    tokenizer = AutoTokenizer.from_pretrained(home / "dpo" / "model")
    now, first = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (home / "dpo" / "model", home / "model")
    )
    margins = []
    for line in (home / "held_out.jsonl").read_text().splitlines():
        row = json.loads(line)
        ratios = [
            plain_sums(now, tokenizer, row["prompt"], row[name])
            - plain_sums(first, tokenizer, row["prompt"], row[name])
            for name in ("chosen", "rejected")
        ]
        margins.append(0.5 * (ratios[0] - ratios[1]))
    margin = torch.stack(margins)
    last = metrics(home / "dpo")[-1]
    assert last["eval/rewards/margin"] == pytest.approx(margin.mean().item(), rel=1e-4)
    assert last["eval/accuracy"] == pytest.approx((margin > 0).float().mean().item())
    expected = -torch.nn.functional.logsigmoid(margin).mean().item()
    assert last["eval/loss"] == pytest.approx(expected, rel=1e-4)


def test_a_resumed_run_is_the_run_that_was_never_stopped(home: Path, whole: Outcome) -> None:
    """Bit for bit: the reference is again the actor's first weights, not the checkpoint's."""
    cut_off(home / "dpo", home / "again", 50)
    resumed = run_here(home, "dpo", "dpo.yaml", "--run.directory", "again", "--run.resume", "must")
    assert (whole.code, resumed.code) == (0, 0), resumed.err
    assert "resumed after step 50" in resumed.out
    assert metrics(home / "again") == metrics(home / "dpo")
    a, b = (load_file(home / d / "model" / "model.safetensors") for d in ("dpo", "again"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("loss", [slow("simpo"), "orpo"])
def test_reference_free_losses_learn_too(home: Path, loss: str) -> None:
    done = run_here(
        home,
        *("dpo", "dpo.yaml", "--run.directory", loss),
        *("--algorithm.loss.name", loss, "--algorithm.loss.options", "{}"),
    )
    assert done.code == 0, done.err
    rows = metrics(home / loss)
    assert rows[-1]["eval/accuracy_low"] > 0.6
    assert "seconds/score" not in (home / loss / "metrics.jsonl").read_text()
    assert column(rows, "eval/loss")[-1] < column(rows, "eval/loss")[0]


def test_a_loss_of_ones_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of its module is where Python looks."""
    monkeypatch.syspath_prepend(home)
    (home / "my_pairs.py").write_text(
        "from plimsoll.algorithm.inputs import LossOutput\n"
        "def flat(inputs, reference, *, scale: float = 1.0):\n"
        "    margin_P = (inputs.logprobs - reference).margin_P\n"
        "    return LossOutput(-scale * margin_P.sum() / inputs.pairs, {})\n"
    )
    done = run_here(
        home,
        *("dpo", "dpo.yaml", "--run.directory", "own", "--run.steps", "3"),
        *("--algorithm.loss.name", "my_pairs:flat", "--algorithm.loss.options", "{scale: 0.1}"),
        *("--run.eval_every", "3"),
    )
    assert done.code == 0, done.err
    losses = column(metrics(home / "own"), "loss")
    assert losses[0] == 0 and losses[-1] < 0


def test_bad_pairs_are_named_by_file_line_and_field(home: Path) -> None:
    good = (home / "pairs.jsonl").read_text().splitlines()[:20]
    bad = [
        {"prompt": "1+1=", "chosen": " 2", "rejected": " 2"},
        {"prompt": "1+1=", "chosen": "", "rejected": " 2"},
        {"prompt": "1+1=", "chosen": 2, "rejected": " 2"},
        {"prompt": "1" * 16, "chosen": " 1", "rejected": " 2"},
        {"prompt": "1+1=", "chosen": " 2", "rejected": " 2" * 9},
    ]
    (home / "bad.jsonl").write_text("\n".join([*good, *map(json.dumps, bad)]) + "\n")
    flags = ["--data.train.path", "bad.jsonl", "--run.directory", "bad", "--run.steps", "2"]
    stopped = run_here(home, "dpo", "dpo.yaml", *flags)
    assert stopped.code == 2
    for line, field, problem in (
        (21, "rejected", "equals `chosen`"),
        (22, "chosen", "is empty"),
        (23, "chosen", "must be text or a list of messages, but is a number"),
        (24, "prompt", "has a prompt of 16 tokens"),
        (25, "rejected", "has 23 tokens, over `data.max_tokens: 16`"),
    ):
        assert f"bad.jsonl:{line}: {field}: {problem}" in stopped.err
    (home / "bad_held_out.jsonl").write_text("\n".join([*good, json.dumps(bad[0])]) + "\n")
    flags += ["--data.on_bad_row", "skip", "--data.eval.path", "bad_held_out.jsonl"]
    skipped = run_here(home, "dpo", "dpo.yaml", *flags)
    assert skipped.code == 0 and "skipped 6 bad rows" in skipped.out
    listed = [json.loads(line) for line in (home / "bad" / "bad_rows.jsonl").open()]
    assert [row["file"] for row in listed] == ["bad.jsonl"] * 5 + ["bad_held_out.jsonl"]


@pytest.mark.engine
@pytest.mark.slow
def test_dpo_on_two_ranks_with_prompts_computed_twice_is_dpo_on_one(
    home: Path, shared_ray: tuple[str, ...]
) -> None:
    flags = ["--run.steps", "4", "--run.eval_every", "2", "--batch.pairs", "5"]
    alone = run_here(home, "dpo", "dpo.yaml", "--run.directory", "alone", *flags)
    ranks = [*shared_ray, "--cluster.ranks", "2", "--cluster.threads", "1"]
    ranks += ["--actor.zero.stage", "3", "--run.directory", "together"]
    ranks += ["--batch.share_prompts", "false"]
    together = run_here(home, "dpo", "dpo.yaml", *flags, *ranks)
    assert (alone.code, together.code) == (0, 0), together.err
    one, two = metrics(home / "alone"), metrics(home / "together")
    for name in ("loss", "rewards/margin", "accuracy", "grad_norm", "eval/loss", "eval/accuracy"):
        assert column(one, name), name
        np.testing.assert_allclose(column(two, name), column(one, name), rtol=1e-3, atol=1e-5)
