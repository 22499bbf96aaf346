"""A gradient that is not a number ends the run with an error, or is left out; weights, moments and
moving average stay as they were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from choice import slow
from engine_cases import (
    BATCHES,
    RATES,
    Setting,
    cut_for,
    make_batch,
    own_packs,
    sft_step,
    zero_stage,
)
from ranks import RankProcesses

from plimsoll.config.base import Choice
from plimsoll.config.engine import EmaConfig
from plimsoll.errors import PlimsollError
from plimsoll.records import ADVANTAGES, SAMPLER_LOGPROBS
from plimsoll.trainer.objectives import PolicyObjective
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import UpdateResult, Worker


def step_on_nan(worker: Worker, place: Place) -> UpdateResult:
    """A step with NaN advantages, as rank 0 sees them; the others' are finite."""
    batch = make_batch((9, 12, 5, 7), seed=3)
    packs = own_packs(place, batch, 64)
    number = np.nan if place.rank == 0 else 1.0
    advantages = [np.full_like(a, number) for a in batch.advantages]
    columns = cut_for(packs, {ADVANTAGES: advantages, SAMPLER_LOGPROBS: advantages})
    objective = PolicyObjective(Choice(name="clip"))
    return worker.train("actor", packs, columns, batch.counts, objective, RATES[0])


def refused_step(place: Place, model: Path, setting: Setting) -> tuple[str, bool]:
    """Return what a step with NaN advantages says, and whether the weights are as they were."""
    worker = load_actor(place, model, setting)
    packs = own_packs(place, BATCHES[0], 64)
    before = worker.log_probs("actor", packs)
    with pytest.raises(PlimsollError) as refusal:
        step_on_nan(worker, place)
    after = worker.log_probs("actor", packs)
    same = all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
    return str(refusal.value), same


def load_actor(place: Place, model: Path, setting: Setting) -> Worker:
    worker = Worker(place)
    worker.load_model("actor", setting.role(model), temperature=1.0)
    return worker


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(0, "bfloat16"), (2, "float32")],
)
def test_a_gradient_that_is_not_finite_is_an_error(
    one_rank: RankProcesses, tied: Path, stage: int, dtype: str
) -> None:
    setting = Setting(zero_stage(stage), dtype="bfloat16" if dtype == "bfloat16" else "float32")
    [(said, same)] = one_rank.run(refused_step, tied, setting)
    assert "the gradient norm is" in said and "share of the loss nan." in said
    assert same


@dataclass(frozen=True)
class Guarded:
    """norms: of the steps that were left out. said: at the third in a row. spoilt, clean: the steps
    and the bytes of scores of a run with such steps in between, and of one without."""

    norms: list[float]
    said: str
    spoilt: tuple[list[UpdateResult], list[bytes]]
    clean: tuple[list[UpdateResult], list[bytes]]


def learn(
    worker: Worker, place: Place, spoil: Sequence[int]
) -> tuple[list[UpdateResult], list[bytes]]:
    """Three steps, each with as many steps on NaN before it as `spoil` says."""
    steps = []
    for batch, rate, bad in zip(BATCHES, RATES, spoil, strict=True):
        for _ in range(bad):
            assert not math.isfinite(step_on_nan(worker, place).grad_norm)
        steps.append(sft_step(worker, place, batch, 31, rate))
    scores = worker.log_probs("actor", own_packs(place, BATCHES[0], 31))
    worker.swap_average("actor")
    scores += worker.log_probs("actor", own_packs(place, BATCHES[0], 31))
    return steps, [array.tobytes() for array in scores]


def left_out(place: Place, model: Path, setting: Setting) -> Guarded:
    clean = learn(load_actor(place, model, setting), place, (0, 0, 0))
    worker = load_actor(place, model, setting)
    spoilt = learn(worker, place, (1, 2, 1))
    norms = [step_on_nan(worker, place).grad_norm for _ in range(2)]
    with pytest.raises(PlimsollError) as refusal:
        step_on_nan(worker, place)
    return Guarded(norms, str(refusal.value), spoilt, clean)


ALL_CPU = zero_stage(3, optimizer_offload="cpu", parameter_offload="cpu")
GUARDED = {
    "zero-0-bf16": (2, Setting(zero_stage(0), "bfloat16")),
    "zero-2-cpu-adam": (1, Setting(zero_stage(2, optimizer_offload="cpu"))),
    "zero-3-all-cpu-bf16": (1, Setting(ALL_CPU, "bfloat16")),
    "zero-3-bf16": (2, Setting(zero_stage(3), "bfloat16")),
    "zero-3-8-bit": (1, Setting(zero_stage(3), "bfloat16", optimizer="adamw_8bit")),
}


@pytest.mark.parametrize("name", [*[*GUARDED][::2], *map(slow, [*GUARDED][1::2])])
def test_steps_that_are_left_out_change_nothing(
    name: str, tied: Path, one_rank: RankProcesses, two_ranks: RankProcesses
) -> None:
    ranks, setting = GUARDED[name]
    guarded = replace(setting, max_skipped_steps=2, ema=EmaConfig(decay=0.5))
    for seen in (one_rank, two_ranks)[ranks - 1].run(left_out, tied, guarded):
        assert seen.spoilt == seen.clean
        assert not any(math.isfinite(norm) for norm in seen.norms)
        assert "in 3 steps in a row" in seen.said
