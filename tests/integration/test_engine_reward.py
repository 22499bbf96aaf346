"""Reward models learn the same on one rank and two, at every ZeRO stage, however batches are split
into micro-batches: as in plain PyTorch, unpacked, every response by itself.

Metrics, gradient norms and the weights after three steps are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from choice import slow
from engine_cases import RATES, SEED, Batch, Setting, make_batch, zero_stage
from engine_reference import (
    Metrics,
    PlainRun,
    distance,
    plain_critic,
    plain_run,
    saved_weights,
    worst_error,
)
from pair_cases import pairs_of
from peft import PeftModel
from ranks import RankProcesses
from test_adapters_equal import KINDS, METRICS_BOUND, WEIGHTS_BOUND, saved
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

from plimsoll.config.base import Choice
from plimsoll.data.packing import pack, pack_pairs
from plimsoll.engine.objectives import ProcessObjective, RewardObjective
from plimsoll.engine.process_group import Place
from plimsoll.engine.worker import UpdateResult, Worker
from plimsoll.jobs import rm_loop as reward_model
from plimsoll.records import BatchCounts, Floats, Sample, to_packed

BATCHES = tuple(make_batch((9, 30, 14, 6, 22, 8, 17, 5, 12, 12), seed) for seed in (1, 2, 3))
"""Five pairs a step: samples 0 and 1, 2 and 3, ...; as single responses, each learned token is the
end of a step."""
MARGINS = np.array([0, 0.5, 1, 0, 2], dtype=np.float32)
CENTRING = 0.3
OBJECTIVE = RewardObjective(Choice(name="log_sigmoid"), CENTRING)
TIGHT = 39
"""A budget that just holds the longest pair: several packs a rank, and fillers."""


def labels_of(batch: Batch) -> list[Floats]:
    """Of each step: right or wrong, or between."""
    rng = np.random.default_rng(len(batch.samples[0].tokens))
    return [
        rng.choice([0, 1, 0.25], int(s.loss_mask.sum())).astype(np.float32) for s in batch.samples
    ]


def train_pairs(
    place: Place, model: Path, setting: Setting, share: bool, out: Path
) -> list[UpdateResult]:
    """Three steps on pairs; the model before and after is saved."""
    worker = Worker(place)
    worker.load_value("actor", setting.role(model), SEED)
    worker.save_model("actor", out / "first")
    results = []
    for batch, rate in zip(BATCHES, RATES, strict=True):
        pairs = [
            replace(
                pair,
                chosen=reward_model.cut_to_response(pair.chosen),
                rejected=reward_model.cut_to_response(pair.rejected),
            )
            for pair in pairs_of(batch)
        ]
        budget = setting.micro_batch_tokens
        packs = pack_pairs(pairs, place.ranks, budget, share_prompts=share)[place.rank]
        streams = [MARGINS[reward_model.pairs_of(p)] for p in packs]
        counts = BatchCounts(10, 10)
        results.append(worker.train("actor", packs, streams, counts, OBJECTIVE, rate))
    worker.save_model("actor", out / "last")
    return results


def train_steps(place: Place, model: Path, setting: Setting, out: Path) -> list[UpdateResult]:
    """Three steps on labelled steps; the model after them is saved."""
    worker = Worker(place)
    worker.load_value("actor", setting.role(model), SEED)
    results = []
    for batch, rate in zip(BATCHES, RATES, strict=True):
        packs = pack(batch.samples, place.ranks, setting.micro_batch_tokens)[place.rank]
        streams = [to_packed(p, labels_of(batch)) for p in packs]
        results.append(
            worker.train("actor", packs, streams, batch.counts, ProcessObjective(), rate)
        )
    worker.save_model("actor", out / "last")
    return results


def plain_scores(model: Any, sample: Sample) -> Tensor:
    """At every learned token: that token is the last that was read."""
    tokens = torch.from_numpy(sample.tokens)
    hidden_TH = inner(model).model(tokens[None], use_cache=False).last_hidden_state[0]
    scores_T: Tensor = inner(model).score(hidden_TH)[:, 0].float()
    return scores_T[torch.from_numpy(sample.loss_mask)]


def inner(model: Any) -> Any:
    return model.base_model.model if isinstance(model, PeftModel) else model


def plain_rewards(model: Any, batch: Batch) -> Metrics:
    """`OBJECTIVE`, pair by pair, as the papers write it."""
    terms, squares, ahead = [], [], []
    for i, margin in enumerate(MARGINS):
        chosen, rejected = (plain_scores(model, batch.samples[2 * i + j])[-1] for j in (0, 1))
        terms.append(-torch.log(torch.sigmoid(chosen - rejected - float(margin))))
        squares.append((chosen + rejected) ** 2)
        ahead.append(chosen - rejected)
    loss, off = torch.stack(terms).mean(), torch.stack(squares).mean()
    return {
        "loss": loss + CENTRING * off,
        "reward_loss": loss,
        "off_centre": off,
        "rewards/margin": torch.stack(ahead).mean(),
        "accuracy": (torch.stack(ahead) > 0).float().mean(),
    }


def plain_process(model: Any, batch: Batch) -> Metrics:
    """Step by step."""
    scores = torch.cat([plain_scores(model, sample) for sample in batch.samples])
    labels = torch.from_numpy(np.concatenate(labels_of(batch)))
    right = torch.sigmoid(scores)
    terms = -labels * torch.log(right) - (1 - labels) * torch.log(1 - right)
    same = (right > 0.5) == (labels > 0.5)
    return {"loss": terms.mean(), "accuracy": same.float().mean(), "labels": labels.mean()}


@cache
def plain(model: Path, rewards: bool) -> PlainRun:
    loss = plain_rewards if rewards else plain_process
    return plain_run(plain_critic(model), loss, BATCHES, 1.0)


@dataclass(frozen=True)
class Case:
    ranks: int
    stage: int
    budget: int
    share: bool = False


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 0, 60, share=True),
        slow(Case(1, 3, 1000)),
        slow(Case(2, 2, TIGHT)),
        Case(2, 3, TIGHT, share=True),
    ],
    ids=str,
)
def test_a_reward_model_learns_as_in_plain_pytorch(
    case: Case, untied: Path, tmp_path: Path, one_rank: RankProcesses, two_ranks: RankProcesses
) -> None:
    setting = Setting(zero_stage(case.stage), micro_batch_tokens=case.budget)
    pool = one_rank if case.ranks == 1 else two_ranks
    results = pool.run(train_pairs, untied, setting, case.share, tmp_path)
    want = plain(untied, rewards=True)
    assert worst_error(results, want) < METRICS_BOUND
    assert distance(saved_weights(tmp_path / "last"), want) < WEIGHTS_BOUND


@pytest.mark.parametrize("case", [slow(Case(1, 2, 1000)), Case(2, 3, 31)], ids=str)
def test_a_process_reward_model_learns_as_in_plain_pytorch(
    case: Case, untied: Path, tmp_path: Path, one_rank: RankProcesses, two_ranks: RankProcesses
) -> None:
    setting = Setting(zero_stage(case.stage), micro_batch_tokens=case.budget)
    pool = one_rank if case.ranks == 1 else two_ranks
    results = pool.run(train_steps, untied, setting, tmp_path)
    want = plain(untied, rewards=False)
    assert worst_error(results, want) < METRICS_BOUND
    assert distance(saved_weights(tmp_path / "last"), want) < WEIGHTS_BOUND


def named_as_saved(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A head that is trained whole beside an adapter has a wrapper in PEFT, and none on disk."""
    return {n.replace(".modules_to_save", "").replace(".default", ""): weights[n] for n in weights}


@pytest.mark.parametrize("kind", [slow("lora"), "qlora"])
def test_an_adapter_and_the_head_learn_as_in_peft(
    kind: str, untied: Path, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    """PEFT loads both from what is saved."""
    setting = replace(KINDS[kind], zero=zero_stage(3), micro_batch_tokens=TIGHT)
    results = two_ranks.run(train_pairs, untied, setting, True, tmp_path)
    base = plain_critic(untied) if kind == "lora" else quantised_critic(untied)
    peft = PeftModel.from_pretrained(base, tmp_path / "first", is_trainable=True).train()
    run = plain_run(peft, plain_rewards, BATCHES, 1.0)
    want = replace(run, before=named_as_saved(run.before), after=named_as_saved(run.after))
    assert worst_error(results, want) < METRICS_BOUND
    assert distance(saved(tmp_path / "last"), want) < WEIGHTS_BOUND


def quantised_critic(model: Path) -> Any:
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["score"],
    )
    loaded = AutoModelForSequenceClassification.from_pretrained(
        model,
        num_labels=1,
        dtype=torch.float32,
        quantization_config=settings,
        attn_implementation="eager",
    )
    return loaded.train()
