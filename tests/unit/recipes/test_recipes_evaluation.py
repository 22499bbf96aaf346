"""What evaluations report: the names that `run.best.metric` is checked against, loss by loss, and
the numbers that are of whole responses or solutions."""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from plimsoll.algorithm import preference_loss as preference_losses
from plimsoll.algorithm import reward_loss as reward_losses
from plimsoll.algorithm import unpaired_loss as unpaired_losses
from plimsoll.algorithm.choice import preference_loss
from plimsoll.algorithm.interval import wilson_interval
from plimsoll.algorithm.separation import separation_interval
from plimsoll.config.evaluation import evaluation_metrics
from plimsoll.config.jobs import DpoConfig, KtoConfig, PrmConfig, RmConfig
from plimsoll.config.which import JOBS, load_any_config
from plimsoll.errors import PlimsollError
from plimsoll.recipes.evaluate import run_eval
from plimsoll.recipes.found_models import FoundModel
from plimsoll.recipes.kto import response_metrics
from plimsoll.recipes.preference import pair_metrics
from plimsoll.recipes.process_reward import process_metrics
from plimsoll.recipes.reward_model import score_metrics
from plimsoll.records import Floats, LabelledSteps, Sample

torch.set_num_threads(1)

BASE: dict[str, Any] = {
    "run": {"directory": "out", "steps": 1},
    "data": {"train": {"path": "x.jsonl"}},
    "actor": {"model": {"path": "m"}},
}
FOUR = np.array([-1.0, -2.0, -3.0, -2.5], dtype=np.float32)


def names_of(package: ModuleType) -> list[str]:
    return [file.name for file in pkgutil.iter_modules(package.__path__)]


def config_of(job: str, loss: str | None = None) -> Any:
    own = {} if loss is None else {"algorithm": {"loss": {"name": loss}}}
    return JOBS[job].model_validate(BASE | own)


def told(metrics: dict[str, float]) -> set[str]:
    return {f"eval/{name}" for name in metrics}


@pytest.mark.parametrize("name", names_of(preference_losses))
def test_every_preference_loss_reports_the_names(name: str) -> None:
    config: DpoConfig = config_of("dpo", name)
    loss = preference_loss(config.algorithm.loss)
    reference = FOUR - 1 if loss.needs_reference else None
    found = pair_metrics(config, loss, FOUR, np.full(4, 2, dtype=np.float32), reference)
    assert told(found) == set(evaluation_metrics(config))


@pytest.mark.parametrize("name", names_of(reward_losses))
def test_every_reward_loss_reports_the_names(name: str, tmp_path: Path) -> None:
    config: RmConfig = config_of("rm", name)
    picture = tmp_path / "out" / "calibration.png"
    found = score_metrics(config, FOUR, np.zeros(2, dtype=np.float32), picture)
    assert told(found) == set(evaluation_metrics(config))
    assert picture.is_file()


@pytest.mark.parametrize("name", names_of(unpaired_losses))
def test_every_unpaired_loss_reports_the_names(name: str) -> None:
    config: KtoConfig = config_of("kto", name)
    found = response_metrics(config, FOUR, np.array([True, False, True, False]), 0.0)
    assert told(found) == set(evaluation_metrics(config))


def test_the_accuracy_of_responses_is_over_all_pairings_of_the_two_labels() -> None:
    """Rewards -1 and -3 of desirable, -2 and -2.5 of undesirable ones: two of four pairings."""
    found = response_metrics(config_of("kto"), FOUR, np.array([True, False, True, False]), 0.0)
    assert found["accuracy"] == 0.5
    assert (found["accuracy_low"], found["accuracy_high"]) == separation_interval(0.5, 2, 2)
    alone = response_metrics(config_of("kto"), FOUR, np.ones(4, dtype=np.bool_), 0.0)
    assert not any(name.startswith("accuracy") for name in alone)


def solution(*labels: float) -> LabelledSteps:
    tokens = np.arange(len(labels) + 1)
    return LabelledSteps(Sample(tokens, tokens > 0), np.array(labels, dtype=np.float32))


def scores(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


def test_a_solution_is_right_where_all_of_its_steps_are(tmp_path: Path) -> None:
    """Right and taken so; wrong at its second step and taken so at its first; right but doubted
    once; wrong but not doubted, its label of 0.4 being no right one; wrong in all."""
    rows = [solution(1, 0.6), solution(1, 0), solution(1, 1, 1), solution(0.4), solution(0, 0)]
    given = [scores(2, 1), scores(-1, 3), scores(1, -2, 1), scores(0.5), scores(-1, -1)]
    config: PrmConfig = config_of("prm")
    found = process_metrics(given, rows, tmp_path / "calibration.png")
    assert told(found) == set(evaluation_metrics(config))
    assert found["solution_accuracy"] == pytest.approx(3 / 5)
    low, high = wilson_interval(3 / 5, 5)
    assert (found["solution_accuracy_low"], found["solution_accuracy_high"]) == (low, high)
    assert found["right_solutions"] == pytest.approx(2 / 5)
    assert found["accuracy"] == pytest.approx((2 + 0 + 2 + 0 + 2) / 10)


def test_where_nothing_can_be_written_is_told_before_the_model_is_measured(tmp_path: Path) -> None:
    config, rows = tmp_path / "sft.yaml", tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    config.write_text(
        f"# sft\nrun: {{directory: {tmp_path}, steps: 1}}\nactor: {{model: {{path: {tmp_path}}}}}\n"
        f"data: {{train: {{path: {rows}, text: t}}, eval: {{path: gone.jsonl, text: t}}}}\n"
    )
    found = FoundModel(str(tmp_path), load_any_config(str(config)), rows / "out")
    with pytest.raises(PlimsollError, match=r"Cannot write .*rows\.jsonl/out: "):
        run_eval(found)
    with pytest.raises(PlimsollError, match="Cannot write /sys: "):  # not even by root
        run_eval(replace(found, directory=Path("/sys")))
