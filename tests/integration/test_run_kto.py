"""`plimsoll kto` as a user starts it: it is the paper's training, however it is split over
micro-batches and ranks, and whichever way the reference's log-probs come.

The same training is written out in plain PyTorch and transformers: every sequence by itself, whole
logits, torch's AdamW. Losses, KLs, gradient norms and the weights after all steps are compared.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import metrics, run, write_config, write_task
from engine_reference import plain_policy
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from plimsoll.cli import main
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.recipes.arithmetic import make_tokenizer

pytestmark = pytest.mark.slow

BETA, UNDESIRABLE = 0.5, 1.5
SEQUENCES, STEPS, RATE = 5, 4, 0.003
KTO: dict[str, Any] = {
    "run": {"directory": "kto", "steps": STEPS, "eval_every": STEPS, "tensorboard": False},
    "cluster": {"where": "local", "threads": 1},
    "data": {
        "train": {"path": "rows.jsonl", "prompt": "q", "response": "a", "label": "good"},
        "eval": {"path": "pairs.jsonl", "prompt": "q", "chosen": "a", "rejected": "b"},
        "chat_template": "none",
        "max_tokens": 16,
        "shuffle": False,
    },
    "batch": {"sequences": SEQUENCES, "micro_batch_tokens": 64},
    "actor": {
        "model": {"path": "model", "dtype": "float32"},
        "optimizer": {"learning_rate": RATE, "eps": 1e-4, "weight_decay": 0.1},
    },
    "reference": {"model": {"path": "other", "dtype": "float32"}},
    "algorithm": {"loss": {"options": {"beta": BETA, "undesirable_weight": UNDESIRABLE}}},
}
PRECOMPUTE = ("--reference_logprobs.precompute", "true")
PAIRS = (
    *("--data.train.path", "pairs.jsonl", "--data.train.response", "null"),
    *("--data.train.label", "null", "--data.train.chosen", "a", "--data.train.rejected", "b"),
)


@dataclass(frozen=True)
class Row:
    """Tokens of a prompt and of its response."""

    prompt: list[int]
    response: list[int]
    desirable: bool


@dataclass(frozen=True)
class Plain:
    """Every step's metrics, and the weights before and after all of them."""

    steps: list[dict[str, float]]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, another one for the reference, rows with two neighbours of one prompt, and pairs."""
    home = tmp_path_factory.mktemp("labelled")
    write_task(home)
    shape = tiny_config("qwen2", True, vocab=32, hidden=64, heads=2, feed_forward=96)
    shape.initializer_range = 0.1
    write_tiny_model(home / "other", shape, 7, make_tokenizer())
    questions = [f"{i}+{i * 7 % 10}{'=' * (1 + i % 3)}" for i in range(10)]
    questions[3] = questions[2]
    rows = [
        {"q": questions[i % 10], "a": f" {i * i}#{i}", "good": (True, 1, False, 0)[i * 3 % 4]}
        for i in range(SEQUENCES * STEPS)
    ]
    pairs = [{"q": row["q"], "a": row["a"], "b": f"#{row['a']}"} for row in rows[::2]]
    for name, lines in (("rows", rows), ("pairs", pairs)):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_config(home, "kto", KTO)
    batch = {"pairs": 3, "micro_batch_tokens": 64}
    write_config(home, "dpo", {**KTO, "batch": batch, "algorithm": {}})
    adapted = {**KTO["actor"], "adapter": {"rank": 4}}
    write_config(home, "adapted", {**KTO, "actor": adapted, "reference": None})
    return home


def run_here(home: Path, directory: str, *flags: str, job: str = "kto", config: str = "kto") -> int:
    """Run the job in this process; its exit code."""
    with contextlib.chdir(home):
        return main([job, f"{config}.yaml", "--run.directory", directory, *flags])


def read_rows(home: Path) -> list[Row]:
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    lines = [json.loads(line) for line in (home / "rows.jsonl").read_text().splitlines()]
    return [
        Row(
            tokenizer.encode(line["q"]),
            [*tokenizer.encode(line["a"]), tokenizer.eos_token_id],
            bool(line["good"]),
        )
        for line in lines
    ]


def log_prob(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    tokens = torch.tensor([*prompt, *response])[:16]
    logp_TV = model(tokens[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    total: Tensor = logp_TV.gather(1, tokens[1:, None])[len(prompt) - 1 :].sum()
    return total


def other_response(rows: Sequence[Row], i: int) -> list[int]:
    around = [rows[(i + k) % len(rows)] for k in range(1, len(rows))]
    return next(row for row in around if row.prompt != rows[i].prompt).response


def plain_kto(policy: Any, reference: Any, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Equation 8 of the paper, response by response."""
    with torch.no_grad():
        gaps = [
            log_prob(policy, row.prompt, other) - log_prob(reference, row.prompt, other)
            for row, other in ((row, other_response(rows, i)) for i, row in enumerate(rows))
        ]
        compared = [log_prob(reference, row.prompt, row.response) for row in rows]
    kl = max(0.0, float(torch.stack(gaps).mean()))
    terms, good, bad = [], [], []
    for row, base in zip(rows, compared, strict=True):
        ratio = log_prob(policy, row.prompt, row.response) - base
        if row.desirable:
            terms.append(1 - torch.sigmoid(BETA * (ratio - kl)))
            good.append(BETA * ratio.detach())
        else:
            terms.append(UNDESIRABLE * (1 - torch.sigmoid(BETA * (kl - ratio))))
            bad.append(BETA * ratio.detach())
    return {
        "loss": torch.stack(terms).mean(),
        "kl": torch.tensor(kl),
        "rewards/margin": torch.stack(good).mean() - torch.stack(bad).mean(),
    }


@pytest.fixture(scope="module")
def plain(home: Path) -> Plain:
    policy, reference = (plain_policy(home / name) for name in ("model", "other"))
    named = dict(policy.named_parameters())
    before = {name: p.detach().clone() for name, p in named.items()}
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-4)
    steps, rows = [], read_rows(home)
    for start in range(0, len(rows), SEQUENCES):
        found = plain_kto(policy, reference, rows[start : start + SEQUENCES])
        optimizer.zero_grad()
        found["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.step()
        steps.append({name: x.item() for name, x in found.items()} | {"grad_norm": norm.item()})
    return Plain(steps, before, {name: p.detach() for name, p in named.items()})


def assert_plain(run_directory: Path, plain: Plain) -> None:
    """The run's metrics and weights are those of plain PyTorch, within float32's rounding."""
    for row, want in zip(metrics(run_directory), plain.steps, strict=True):
        assert {name: row[name] for name in want} == pytest.approx(want, rel=2e-4, abs=1e-5)
    got = load_file(run_directory / "model" / "model.safetensors")
    assert got.keys() <= plain.after.keys()
    for name, tensor in got.items():
        way = (plain.after[name] - plain.before[name]).norm()
        assert (tensor - plain.after[name]).norm() < 1e-3 * way, name


def test_the_steps_are_what_they_should_be(home: Path, plain: Plain) -> None:
    """KLs that matter, and a batch with two neighbours of one prompt."""
    assert min(step["kl"] for step in plain.steps) > 0.5
    rows = read_rows(home)
    assert rows[2].prompt == rows[3].prompt and other_response(rows[:5], 2) == rows[4].response


@pytest.mark.parametrize("budget", ["16", "64"])
def test_it_is_plain_kto_however_it_is_split(home: Path, plain: Plain, budget: str) -> None:
    directory = f"budget-{budget}"
    assert run_here(home, directory, "--batch.micro_batch_tokens", budget) == 0
    assert_plain(home / directory, plain)


def test_it_is_plain_kto_on_two_ranks_with_a_reference_that_scored_before(
    home: Path, plain: Plain
) -> None:
    """Five responses on two ranks; actor and reference divided by ZeRO stage 3."""
    flags = ["--cluster.where", "ray", "--cluster.ranks", "2", "--batch.micro_batch_tokens", "16"]
    flags += ["--actor.zero.stage", "3", "--reference.stage", "3", *PRECOMPUTE]
    done = run(home, "kto", "kto.yaml", "--run.directory", "together", *flags)
    assert (done.code, done.err) == (0, "")
    assert "the reference scored" in done.out
    assert_plain(home / "together", plain)


@pytest.mark.parametrize(("job", "config"), [("kto", "kto"), ("dpo", "dpo"), ("kto", "adapted")])
def test_stored_log_probs_are_the_live_ones_bit_for_bit(home: Path, job: str, config: str) -> None:
    """Of KTO, of DPO, and of an actor with an adapter, whose reference it is without it; over two
    epochs, held-out rows too."""
    flags = (*PAIRS, "--run.steps", "6")
    live, stored = f"{config}-live", f"{config}-stored"
    assert run_here(home, live, *flags, job=job, config=config) == 0
    assert run_here(home, stored, *flags, *PRECOMPUTE, job=job, config=config) == 0
    assert metrics(home / live) == metrics(home / stored)
    assert "eval/loss" in metrics(home / live)[-1]
    assert "seconds/precompute" in (home / stored / "metrics.jsonl").read_text()


def test_the_file_serves_other_runs_and_resumes_and_is_refused_where_it_is_of_other_numbers(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*PRECOMPUTE, "--reference_logprobs.path", "kept.parquet", "--run.save_every", "2")
    assert run_here(home, "first", *flags) == 0
    assert "log-probs are in kept.parquet" in capsys.readouterr().out
    assert run_here(home, "second", *flags) == 0
    assert "log-probs are those of kept.parquet" in capsys.readouterr().out
    shutil.rmtree(home / "second" / "checkpoints" / "step-000004")
    shutil.rmtree(home / "second" / "model")
    assert run_here(home, "second", *flags, "--run.resume", "auto") == 0
    assert "resumed after step 2" in capsys.readouterr().out
    assert metrics(home / "first") == metrics(home / "second")
    refused = {
        "another reference than model": ("--reference.model.path", "model"),
        "another reference than other in bfloat16": ("--reference.model.dtype", "bfloat16"),
        "its rows, lengths or template are others": ("--batch.sequences", "4"),
    }
    for words, change in refused.items():
        capsys.readouterr()
        assert run_here(home, "refused", *flags, *change) == 2
        assert words in capsys.readouterr().err
        shutil.rmtree(home / "refused")


def test_bad_labels_are_named_by_file_and_line(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (home / "rows.jsonl").read_text().splitlines()
    bad = json.dumps({"q": "1+1=", "a": " 2", "good": "yes"})
    (home / "bad.jsonl").write_text("\n".join([*good, bad]) + "\n")
    assert run_here(home, "bad", "--data.train.path", "bad.jsonl") == 2
    told = f"bad.jsonl:{len(good) + 1}: good: must be true, false, 1 or 0, but is text"
    assert told in capsys.readouterr().err
    alike = [line for line in good if json.loads(line)["good"]]
    (home / "alike.jsonl").write_text("\n".join(alike) + "\n")
    assert run_here(home, "alike", "--data.train.path", "alike.jsonl") == 2
    assert f"Every one of the {len(alike)} rows to learn from is labelled desirable" in (
        capsys.readouterr().err
    )
