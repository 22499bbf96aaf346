"""What evaluations report: the names that `run.best.metric` may have, for each loss.

Also the numbers of whole responses and solutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plimsoll.algorithm.figures import (
    mean_interval,
    separation_interval,
    share_interval,
    wilson_interval,
)
from plimsoll.config.choice import built_in_names
from plimsoll.jobs import JOBS
from plimsoll.jobs.dpo import DpoConfig
from plimsoll.jobs.dpo_loop import pair_metrics
from plimsoll.jobs.kto import KtoConfig
from plimsoll.jobs.kto_loop import response_metrics
from plimsoll.jobs.prm import PrmConfig
from plimsoll.jobs.prm_loop import process_metrics
from plimsoll.jobs.rm import RmConfig
from plimsoll.jobs.rm_loop import score_metrics
from plimsoll.jobs.which import spec_of
from plimsoll.records import (
    Bools,
    Floats,
    LabelledResponse,
    LabelledSteps,
    Pair,
    Prompt,
    RewardPart,
    Sample,
    Trajectory,
    single_turn,
)
from plimsoll.resolve.choices import needs_reference
from plimsoll.rl.evaluate import mean_rewards

torch.set_num_threads(1)

BASE: dict[str, Any] = {
    "run": {"directory": "out", "steps": 1},
    "data": {"train": {"path": "x.jsonl"}},
    "actor": {"model": {"path": "m"}},
}
FOUR = np.array([-1.0, -2.0, -3.0, -2.5], dtype=np.float32)
LABELS = np.array([True, False, True, False])


def config_of(job: str, loss: str | None = None) -> Any:
    algorithm = {} if loss is None else {"algorithm": {"loss": {"name": loss}}}
    return JOBS[job].config.model_validate(BASE | algorithm)


def pair(prompt: int) -> Pair:
    """Return a pair; the test gives its scores apart."""
    sample = Sample(np.arange(2), np.arange(2) > 0)
    return Pair(sample, sample, prompt=prompt)


def responses(desirable: Bools, prompts: Sequence[int]) -> list[LabelledResponse]:
    """Return labelled responses; the test gives their log-ratios apart."""
    sample = Sample(np.arange(2), np.arange(2) > 0)
    rows = zip(desirable.tolist(), prompts, strict=True)
    return [LabelledResponse(sample, label, prompt=prompt) for label, prompt in rows]


def written_names(metrics: dict[str, float]) -> set[str]:
    return {f"eval/{name}" for name in metrics}


@pytest.mark.parametrize("name", built_in_names("plimsoll.algorithm.preference_loss"))
def test_every_preference_loss_reports_the_names(name: str) -> None:
    config: DpoConfig = config_of("dpo", name)
    reference = FOUR - 1 if needs_reference(config.algorithm.loss) else None
    metrics = pair_metrics(config, [pair(1), pair(2)], FOUR, reference)
    assert written_names(metrics) == set(spec_of(config).evaluation.written_names)


@pytest.mark.parametrize("name", built_in_names("plimsoll.algorithm.reward_loss"))
def test_every_reward_loss_reports_the_names(name: str, tmp_path: Path) -> None:
    config: RmConfig = config_of("rm", name)
    picture = tmp_path / "out" / "calibration.svg"
    metrics = score_metrics(config, FOUR, [pair(1), pair(2)], picture)
    assert written_names(metrics) == set(spec_of(config).evaluation.written_names)
    assert picture.is_file()


@pytest.mark.parametrize("name", built_in_names("plimsoll.algorithm.feedback_loss"))
def test_every_feedback_loss_reports_the_names(name: str) -> None:
    config: KtoConfig = config_of("kto", name)
    metrics = response_metrics(config, responses(LABELS, range(4)), FOUR, 0.0)
    assert written_names(metrics) == set(spec_of(config).evaluation.written_names)


def test_the_accuracy_of_responses_is_over_all_pairings_of_the_two_labels() -> None:
    """Rewards are -1, -3 (desirable) and -2, -2.5 (undesirable): two of four pairings are right."""
    metrics = response_metrics(config_of("kto"), responses(LABELS, range(4)), FOUR, 0.0)
    assert metrics["accuracy"] == 0.5
    assert (metrics["accuracy_low"], metrics["accuracy_high"]) == separation_interval(0.5, 2, 2)
    desirable = responses(np.ones(4, dtype=np.bool_), range(4))
    alone = response_metrics(config_of("kto"), desirable, FOUR, 0.0)
    assert not any(name.startswith("accuracy") for name in alone)


def solution(*labels: float, prompt: int = 0) -> LabelledSteps:
    tokens = np.arange(len(labels) + 1)
    sample = Sample(tokens, tokens > 0)
    return LabelledSteps(sample, np.array(labels, dtype=np.float32), prompt=prompt)


def scores(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


def test_a_solution_is_right_where_all_of_its_steps_are(tmp_path: Path) -> None:
    """Five solutions, of which three are judged as they are.

    Right, judged right; wrong at its second step, judged wrong at its first; right, doubted once;
    wrong, not doubted (a label of 0.4 is not right); wrong in all steps, judged wrong.
    """
    labels: list[tuple[float, ...]] = [(1, 0.6), (1, 0), (1, 1, 1), (0.4,), (0, 0)]
    rows = [solution(*steps, prompt=i) for i, steps in enumerate(labels)]
    answers = [scores(2, 1), scores(-1, 3), scores(1, -2, 1), scores(0.5), scores(-1, -1)]
    config: PrmConfig = config_of("prm")
    metrics = process_metrics(answers, rows, tmp_path / "calibration.svg")
    assert written_names(metrics) == set(spec_of(config).evaluation.written_names)
    assert metrics["solution_accuracy"] == pytest.approx(3 / 5)
    low, high = wilson_interval(3 / 5, 5)
    assert (metrics["solution_accuracy_low"], metrics["solution_accuracy_high"]) == (low, high)
    assert metrics["right_solutions"] == pytest.approx(2 / 5)
    assert metrics["accuracy"] == pytest.approx((2 + 0 + 2 + 0 + 2) / 10)


BY_PROMPT = [*range(8), *range(8)]
"""Of sixteen rows, two a prompt."""
HARD = np.repeat([1.0, -1.0], 8)[[2 * row + half for half in (0, 1) for row in range(8)]]
"""Of which the first four prompts are easy and the others hard: 1 where a row is right."""


def interval_of(metrics: dict[str, float], name: str) -> tuple[float, float]:
    return metrics[f"{name}_low"], metrics[f"{name}_high"]


def test_the_accuracys_interval_is_over_prompts_in_every_job(tmp_path: Path) -> None:
    """Both rows of a prompt are right, or both wrong: sixteen rows count as eight."""
    expected = share_interval((HARD + 1) / 2, BY_PROMPT)
    assert expected[1] - expected[0] > 1.3 * np.diff(wilson_interval(0.5, 16))
    logprobs = np.stack([HARD, np.zeros(16)], 1).ravel().astype(np.float32)
    pairs = [pair(prompt) for prompt in BY_PROMPT]
    dpo = pair_metrics(config_of("dpo"), pairs, logprobs, 0 * logprobs)
    rm = score_metrics(config_of("rm"), logprobs, pairs, tmp_path / "rm.svg")
    rows = [solution(1, prompt=prompt) for prompt in BY_PROMPT]
    prm = process_metrics([scores(score) for score in HARD], rows, tmp_path / "prm.svg")
    assert interval_of(dpo, "accuracy") == pytest.approx(expected)
    assert interval_of(rm, "accuracy") == pytest.approx(expected)
    assert interval_of(prm, "solution_accuracy") == pytest.approx(expected)


def test_the_interval_of_responses_is_over_prompts() -> None:
    """Each response twice, as two of one prompt, counts once."""
    rewards = np.array([3, 1, 2, 0, 1.5, 0.5], dtype=np.float32)
    labels = np.array([True, False, True, False, False, True])
    kto = config_of("kto")
    once = response_metrics(kto, responses(labels, range(6)), rewards, 0.0)
    doubled = responses(labels.repeat(2), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5])
    twice = response_metrics(kto, doubled, rewards.repeat(2), 0.0)
    (low, high), (low_twice, high_twice) = (interval_of(m, "accuracy") for m in (once, twice))
    assert once["accuracy"] == twice["accuracy"]
    assert low_twice < low and high < high_twice


def answer(prompt: int, sample: int, **rewards: float) -> Trajectory:
    nothing = np.zeros(0, dtype=np.float32)
    parts = tuple(RewardPart(name, value) for name, value in rewards.items())
    held_out = Prompt(10 * prompt + sample, np.array([1, prompt]), "?")
    return single_turn(held_out, 0, np.zeros(0, np.int64), nothing, "", "stop", 0, parts)


def test_rewards_have_intervals_over_prompts_whatever_they_are() -> None:
    """Held-out prompts come twice, as rows with the same tokens."""
    answers = [(p, s, float(p % 2), float(p + s)) for p in range(8) for s in range(2)]
    metrics = mean_rewards(
        [answer(p, s, right=right, long=length) for p, s, right, length in answers]
    )
    prompts = [p for p, *_ in answers]
    assert metrics["right"] == 0.5
    assert interval_of(metrics, "right") == share_interval([x[2] for x in answers], prompts)
    assert interval_of(metrics, "long") == mean_interval([x[3] for x in answers], prompts)
    total = mean_interval([x[2] + x[3] for x in answers], prompts)
    assert interval_of(metrics, "reward") == total
