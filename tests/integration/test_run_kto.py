"""`plimsoll kto` as a user starts it: it is the paper's training, however it is split over
micro-batches and ranks.

The same training is written out in plain PyTorch and transformers: every sequence by itself, whole
logits, torch's AdamW. Losses, KLs, gradient norms and the weights after all steps are compared.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import metrics, run_here
from engine_reference import plain_policy
from kto_cases import BETA, PRECOMPUTE, RATE, SEQUENCES, UNDESIRABLE, train_here, write_labelled
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from plimsoll.cli import main


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
    home = tmp_path_factory.mktemp("labelled")
    write_labelled(home)
    return home


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
    assert train_here(home, directory, "--batch.micro_batch_tokens", budget) == 0
    assert_plain(home / directory, plain)


@pytest.mark.engine
@pytest.mark.slow
def test_it_is_plain_kto_on_two_ranks_with_a_reference_that_scored_before(
    home: Path, plain: Plain, shared_ray: tuple[str, ...]
) -> None:
    """Five responses on two ranks; actor and reference divided by ZeRO stage 3."""
    flags = [*shared_ray, "--cluster.ranks", "2", "--batch.micro_batch_tokens", "16"]
    flags += ["--actor.zero.stage", "3", "--reference.zero.stage", "3", *PRECOMPUTE]
    done = run_here(home, "kto", "kto.yaml", "--run.directory", "together", *flags)
    assert done.code == 0, done.err
    assert "the reference scores 56 of 56" in done.out
    assert_plain(home / "together", plain)


def test_bad_labels_are_named_by_file_and_line(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (home / "rows.jsonl").read_text().splitlines()
    bad = json.dumps({"q": "1+1=", "a": " 2", "good": "yes"})
    (home / "bad.jsonl").write_text("\n".join([*good, bad]) + "\n")
    assert train_here(home, "bad", "--data.train.path", "bad.jsonl") == 2
    assert f"bad.jsonl:{len(good) + 1}: good: " in capsys.readouterr().err
    alike = [line for line in good if json.loads(line)["good"]]
    (home / "alike.jsonl").write_text("\n".join(alike) + "\n")
    assert train_here(home, "alike", "--data.train.path", "alike.jsonl") == 2
    assert re.search(rf"\b{len(alike)} rows .*\bdesirable", capsys.readouterr().err)


def test_plimsoll_eval_measures_what_the_paper_says(home: Path) -> None:
    """The accuracy by counting pairings of a desirable and an undesirable response."""
    columns = {"path": "rows.jsonl", "response": "a", "label": "good", "limit": 17}
    source = columns | {"chosen": "null", "rejected": "null"}
    flags = [f"--data.eval.{name}={value}" for name, value in source.items()]
    with contextlib.chdir(home):
        assert main(["eval", "kto.yaml", "--out", "measured", *flags]) == 0
    found = json.loads((home / "measured" / "eval.json").read_text())
    rows = read_rows(home)[:17]
    policy, reference = (plain_policy(home / name) for name in ("model", "other"))
    wanted = {name: x.item() for name, x in plain_kto(policy, reference, rows).items()}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    with torch.no_grad():
        good, bad = (
            [
                log_prob(policy, row.prompt, row.response)
                - log_prob(reference, row.prompt, row.response)
                for row in rows
                if row.desirable is desirable
            ]
            for desirable in (True, False)
        )
    ahead = [a > b for a in good for b in bad]
    assert len(good) != len(bad) and 0 < sum(ahead) < len(ahead)
    assert found["accuracy"] == pytest.approx(sum(ahead) / len(ahead))
    assert found["accuracy_low"] < found["accuracy"] < found["accuracy_high"]
    assert found["rows"] == len(rows) == 17
