"""Every job trains the same in every form that the rules allow: all weights, LoRA and QLoRA, at
ZeRO 0, 2 and 3, on one rank and two.

`make test` runs as few of them as have every two of these choices together, `make test-all` each.
Each is held against the same job on one rank, undivided, one sequence or pair at a time; that this
is what plain PyTorch does is the matter of the job's own tests.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from choice import pairwise, pairwise_first
from decided import decided_model
from distill_cases import OBJECTIVE as DISTILLATION
from engine_cases import BATCHES as SAMPLED
from engine_cases import (
    RATES,
    SEED,
    Batch,
    Setting,
    own_packs,
    policy_step,
    sft_step,
    zero_stage,
)
from pair_cases import DPO, PAIR_BATCHES, own_pair_packs
from ranks import RankProcesses
from test_adapters_equal import KINDS

from plimsoll.algorithm.inputs import LabelCounts
from plimsoll.config.base import Choice
from plimsoll.config.engine import FrozenRole
from plimsoll.engine.objectives import (
    FeedbackObjective,
    FeedbackStream,
    ProcessObjective,
    RewardObjective,
)
from plimsoll.engine.process_group import Place
from plimsoll.engine.worker import UpdateResult, Worker
from plimsoll.engine.zero.config import FrozenZeroConfig, ZeroConfig

JOBS = ("sft", "dpo", "kto", "rm", "prm", "distill", "ppo")
FORMS = {"full": Setting(ZeroConfig())} | KINDS
STAGES, RANKS = (0, 2, 3), (1, 2)
AXES = (JOBS, tuple(FORMS), STAGES, RANKS)
ONE_AT_A_TIME, SPLIT = 39, 60
"""Budgets: the longest pair alone; several sequences, and several packs a rank."""


def train(place: Place, job: str, model: Path, other: Path, setting: Setting) -> list[UpdateResult]:
    """Two steps of the job's own objective."""
    worker = Worker(place)
    load(worker, job, setting, model, other)
    batches = SAMPLED if job == "ppo" else PAIR_BATCHES
    return [
        step(worker, place, job, batch, setting.micro_batch_tokens, rate)
        for batch, rate in zip(batches[:2], RATES[:2], strict=True)
    ]


def load(worker: Worker, job: str, setting: Setting, model: Path, other: Path) -> None:
    """other: the model of a role that is compared with, divided where the actor is."""
    role = setting.role(model)
    if job in ("rm", "prm"):
        worker.load_value("actor", role, SEED)
        return
    worker.load_policy("actor", role, 1.0, SEED)
    frozen = FrozenRole(model=decided_model(path=str(other), dtype="float32")).with_engine(
        FrozenZeroConfig(stage=3 if setting.zero.stage == 3 else 0)
    )
    if job == "distill":
        worker.load_teacher(frozen)
    elif job in ("dpo", "kto"):
        worker.load_policy("reference", frozen, 1.0)


def step(
    worker: Worker, place: Place, job: str, batch: Batch, budget: int, rate: float
) -> UpdateResult:
    match job:
        case "sft":
            return sft_step(worker, place, batch, budget, rate)
        case "ppo":
            return policy_step(worker, place, batch, budget, rate)
        case "dpo":
            packs = own_pair_packs(place, batch, budget, share=True)
            scored = worker.sequence_log_probs("reference", packs)
            return worker.train("actor", packs, scored, batch.counts, DPO, rate)
        case "rm":
            packs = own_pair_packs(place, batch, budget, share=True)
            margins = [np.zeros(len(p.samples_S) // 2, np.float32) for p in packs]
            reward = RewardObjective(Choice(name="log_sigmoid"), 0.3)
            return worker.train("actor", packs, margins, batch.counts, reward, rate)
        case _:
            return step_on_sequences(worker, place, job, batch, budget, rate)


def step_on_sequences(
    worker: Worker, place: Place, job: str, batch: Batch, budget: int, rate: float
) -> UpdateResult:
    packs, counts = own_packs(place, batch, budget), batch.counts
    if job == "distill":
        worker.teacher_forward(packs)
        return worker.train("actor", packs, None, counts, DISTILLATION, rate)
    if job == "prm":
        labels = [(p.targets_L % 2).astype(np.float32) for p in packs]
        return worker.train("actor", packs, labels, counts, ProcessObjective(), rate)
    scored = worker.sequence_log_probs("reference", packs)
    samples = [p.samples_S[p.samples_S >= 0] for p in packs]
    responses = [
        FeedbackStream(scores[: len(own)], own % 2 == 0)
        for scores, own in zip(scored, samples, strict=True)
    ]
    half = counts.sequences // 2
    feedback = FeedbackObjective(Choice(name="kto"), 0.1, LabelCounts(half, half))
    return worker.train("actor", packs, responses, counts, feedback, rate)


def totals(ranks: list[list[UpdateResult]]) -> list[dict[str, float]]:
    """Of each step: its metrics over all ranks, and the gradient's norm."""
    return [
        {name: sum(own.metrics[name] for own in step) for name in step[0].metrics}
        | {"grad_norm": step[0].grad_norm}
        for step in zip(*ranks, strict=True)
    ]


@cache
def undivided(
    one_rank: RankProcesses, job: str, form: str, model: Path, other: Path
) -> list[dict[str, float]]:
    setting = replace(FORMS[form], zero=zero_stage(0), micro_batch_tokens=ONE_AT_A_TIME)
    return totals(one_rank.run(train, job, model, other, setting))


def test_every_two_choices_are_together_in_a_case_that_is_not_slow() -> None:
    """Written out once more: for each two of the axes, all of their values with one another."""
    chosen = pairwise(*AXES)
    for i, j in combinations(range(len(AXES)), 2):
        assert {(case[i], case[j]) for case in chosen} == set(product(AXES[i], AXES[j]))
    assert len(chosen) < 25 and len(pairwise_first(*AXES)) == 7 * 3 * 3 * 2


@pytest.mark.parametrize(("job", "form", "stage", "ranks"), pairwise_first(*AXES))
def test_a_job_is_the_same_in_every_form(
    job: str,
    form: str,
    stage: int,
    ranks: int,
    tied: Path,
    untied: Path,
    one_rank: RankProcesses,
    pool: RankProcesses,
) -> None:
    setting = replace(FORMS[form], zero=zero_stage(stage), micro_batch_tokens=SPLIT)
    found = totals(pool.run(train, job, untied, tied, setting))
    wanted = undivided(one_rank, job, form, untied, tied)
    for own, want in zip(found, wanted, strict=True):
        assert own == pytest.approx(want, rel=1e-4, abs=1e-5)
