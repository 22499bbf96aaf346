"""Distillation measures what it trains on, and its checkpoints hold the weights that are saved,
wherever student and teacher are divided. Other settings are in test_engine_zero.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from distill_cases import Case, PlainDistillation, train_student
from engine_cases import BATCHES, Setting, zero_stage
from engine_reference import distance, plain_policy, plain_run, saved_weights, worst_error
from ranks import RankProcesses

from plimsoll.model.files import WRAPPER
from plimsoll.trainer.checkpoint import read_weights

METRICS_BOUND = 1e-5
WEIGHTS_BOUND = 5e-5
"""Of the way that the weights went; see `distance`."""


@pytest.mark.parametrize(
    ("ranks", "stage", "teacher_stage", "offload"),
    [(1, 0, 0, "cpu"), (2, 3, 3, "none")],
)
def test_distillation_is_that_of_plain_pytorch(
    ranks: int,
    stage: int,
    teacher_stage: Literal[0, 3],
    offload: Literal["none", "cpu"],
    tied: Path,
    untied: Path,
    tmp_path: Path,
    pool: RankProcesses,
) -> None:
    """The student's head is its embedding, the teacher's its own. The checkpoint of any stage and
    ranks holds the weights that were saved."""
    setting = Setting(zero_stage(stage), checkpointing=stage == 3)
    case = Case(setting, untied, teacher_stage, offload)
    results = pool.run(train_student, tied, case, BATCHES, tmp_path)
    want = plain_run(plain_policy(tied), PlainDistillation(untied), BATCHES, 1.0)
    assert worst_error(results, want) < METRICS_BOUND
    after = saved_weights(tmp_path / "model")
    assert distance(after, want) < WEIGHTS_BOUND
    masters = read_weights(tmp_path / "checkpoint", "master")
    assert {name.removeprefix(WRAPPER) for name in masters} == after.keys()
    for name, master in masters.items():
        assert torch.equal(master, after[name.removeprefix(WRAPPER)].flatten())
