"""What is made of a process reward model's scores of steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from plimsoll.config.reward import RewardModelConfig
from plimsoll.rl.reward_model import of_response


def model(steps: dict[str, str] | None) -> RewardModelConfig:
    values: dict[str, Any] = {"role": {"model": {"path": "m"}}, "steps": steps}
    return RewardModelConfig.model_validate(values)


# Scores are logits: ln 3 is a probability of 3/4, 0 of 1/2.
@pytest.mark.parametrize(
    ("take", "value"), [("min", 0.5), ("mean", 0.625), ("product", 0.375), ("last", 0.5)]
)
def test_steps_by_hand(take: str, value: float) -> None:
    scores = np.array([math.log(3), 0.0], dtype=np.float32)
    assert of_response(scores, model({"take": take})) == pytest.approx(value)


def test_a_step_that_is_surely_wrong_has_the_probability_0() -> None:
    """exp(1000) is over the range of a float."""
    scores = np.array([-1000.0, 1000.0], dtype=np.float32)
    assert of_response(scores, model({"take": "min"})) == 0
    assert of_response(scores, model({"take": "last"})) == 1


def test_without_steps_it_is_the_score_itself() -> None:
    assert of_response(np.array([-2.5], dtype=np.float32), model(None)) == -2.5
