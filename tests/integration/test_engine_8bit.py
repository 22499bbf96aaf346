"""AdamW with moments of 8 bits: it learns what AdamW learns, and holds what the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from choice import slow
from engine_cases import BATCHES, RATES, Setting, sft_step, train_sft, zero_stage
from engine_reference import plain_policy, plain_run, saved_weights, sft_loss, whole_distance
from ranks import RankProcesses

from plimsoll.engine.process_group import Place
from plimsoll.engine.worker import Worker
from plimsoll.engine.zero.settings import deepspeed_settings
from plimsoll.engine.zero.sizes import trained_counts, zero_sizes
from plimsoll.errors import ConfigError
from plimsoll.shapes.known_models import read_shape

BOUND = 0.1
"""Of the way that 32-bit AdamW went (`whole_distance`): block-wise 8-bit numbers have errors of a
few per cent, Dettmers et al. 2021, https://arxiv.org/abs/2110.02861, figure 4."""


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), 3])
def test_training_is_nearly_that_of_plain_pytorch(
    stage: int, tied: Path, tmp_path: Path, one_rank: RankProcesses
) -> None:
    want = plain_run(plain_policy(tied), sft_loss, BATCHES, 1.0)
    setting = Setting(zero_stage(stage), optimizer="adamw_8bit")
    one_rank.run(train_sft, tied, setting, BATCHES, tmp_path)
    found = whole_distance(saved_weights(tmp_path), want)
    assert 1e-4 < found < BOUND  # 32 bits would be under 5e-5


def train_in_short_rows(place: Place, model: Path, setting: Setting, out: Path) -> int:
    """With groups of few elements, as those of large models are; gives their number."""
    with patch("plimsoll.engine.zero.optimizer._MOST_IN_8_BITS", 150_000):
        worker = Worker(place)
        worker.load_policy("actor", setting.role(model), temperature=1.0)
    for batch, rate in zip(BATCHES, RATES, strict=True):
        sft_step(worker, place, batch, 31, rate)
        worker.save_checkpoint("actor", out / "checkpoint")
        worker.load_checkpoint("actor", out / "checkpoint")
    worker.save_model("actor", out)
    engine: Any = worker._engines["actor"]
    return len(engine.masters())


@pytest.mark.parametrize("stage", [slow(0), 2, slow(3)])
def test_rows_of_moments_may_be_cut(
    stage: int, tied: Path, tmp_path: Path, one_rank: RankProcesses
) -> None:
    want = plain_run(plain_policy(tied), sft_loss, BATCHES, 1.0)
    setting = Setting(zero_stage(stage), optimizer="adamw_8bit")
    (rows,) = one_rank.run(train_in_short_rows, tied, setting, tmp_path)
    assert rows > 2 and whole_distance(saved_weights(tmp_path), want) < BOUND


def moments(place: Place, model: Path, stage: int) -> tuple[int, int]:
    """Bytes of both moments of large tensors, and the elements of these, after one step."""
    worker = Worker(place)
    setting = Setting(zero_stage(stage), optimizer="adamw_8bit")
    worker.load_policy("actor", setting.role(model), temperature=1.0)
    sft_step(worker, place, BATCHES[0], 31, RATES[0])
    engine: Any = worker._engines["actor"]
    states = engine._engine.optimizer.optimizer.state.values()
    large = [state for state in states if state["state1"].dtype == torch.uint8]
    kept = [state[name] for state in large for name in ("state1", "state2", "absmax1", "absmax2")]
    return sum(t.nbytes for t in kept), sum(state["state1"].numel() for state in large)


def refusal_of_other_moments(place: Place, model: Path, out: Path) -> str:
    """What is said of a checkpoint of 8-bit moments in a run with 32-bit ones."""
    zero = zero_stage(2)
    saved, other = Worker(place), Worker(place)
    saved.load_policy("actor", Setting(zero, optimizer="adamw_8bit").role(model), temperature=1.0)
    saved.save_checkpoint("actor", out / "saved")
    other.load_policy("actor", Setting(zero).role(model), temperature=1.0)
    with pytest.raises(ConfigError) as refusal:
        other.load_checkpoint("actor", out / "saved")
    return str(refusal.value)


def test_a_checkpoint_is_read_back_by_the_same_optimizer_alone(
    tied: Path, tmp_path: Path, one_rank: RankProcesses
) -> None:
    (message,) = one_rank.run(refusal_of_other_moments, tied, tmp_path)
    assert "(then -> now): optimizer.kind: adamw_8bit -> adamw. " in message


@pytest.mark.parametrize("stage", [2, 3])
def test_the_plan_counts_the_moments(stage: int, tied: Path, one_rank: RankProcesses) -> None:
    ((size, elements),) = one_rank.run(moments, tied, stage)
    role = Setting(zero_stage(stage), optimizer="adamw_8bit").role(tied)
    sizes = zero_sizes(deepspeed_settings(role, "cpu", 1), 1)
    plan = trained_counts(role, read_shape(str(tied)), "policy", sizes)
    assert elements > 0.9 * plan.trained
    assert size == pytest.approx(plan.moments * elements, rel=0.001)
