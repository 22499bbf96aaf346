"""The learning rate of every step, worked out by hand."""

from __future__ import annotations

import pytest

from plimsoll.config.engine import OptimizerConfig
from plimsoll.trainer.schedule import learning_rate


def rates(steps: int, **settings: object) -> list[float]:
    config = OptimizerConfig.model_validate({"learning_rate": 1.0, **settings})
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_constant() -> None:
    assert rates(3, schedule="constant") == [1.0, 1.0, 1.0]


def test_constant_after_a_warm_up_that_reaches_the_peak_at_its_last_step() -> None:
    assert rates(6, schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_warm_up_as_a_share_of_all_steps_is_rounded_up() -> None:
    """0.3 of 6 steps are 1.8."""
    assert rates(6, schedule="constant", warmup_ratio=0.3) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(2, schedule="constant", warmup_ratio=0.0) == [1.0, 1.0]


def test_linear_falls_to_nothing_at_the_last_step() -> None:
    assert rates(5, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_linear_to_a_share_of_the_peak_after_a_warm_up() -> None:
    found = rates(7, schedule="linear", warmup_steps=2, final_ratio=0.2)
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_a_wave() -> None:
    """cos 0, 60, 120 and 180 degrees: 1, 1/2, -1/2 and -1."""
    assert rates(4, schedule="cosine") == pytest.approx([1.0, 0.75, 0.25, 0.0])


def test_cosine_to_a_share_of_the_peak_after_a_warm_up() -> None:
    found = rates(5, schedule="cosine", warmup_steps=1, final_ratio=0.5)
    assert found == pytest.approx([1.0, 1.0, 0.875, 0.625, 0.5])


def test_wsd_stays_and_falls_over_the_last_steps() -> None:
    """1 - sqrt of 0, 1/4, 2/4, 3/4 and 1 of the way."""
    found = rates(8, schedule="wsd", warmup_steps=2, decay_steps=4)
    assert found == pytest.approx([0.5, 1, 1, 1, 1 - 0.25**0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0])


def test_wsd_falls_over_a_tenth_by_default_to_a_share_of_the_peak() -> None:
    assert rates(20, schedule="wsd", final_ratio=0.5) == pytest.approx(
        [1.0] * 18 + [1 - 0.5**0.5 / 2, 0.5]
    )


def test_wsd_does_not_fall_before_the_warm_up_is_over() -> None:
    assert rates(4, schedule="wsd", warmup_steps=2, decay_steps=9) == [0.5, 1.0, 1.0, 0.0]


def test_the_peak_scales_all_of_it() -> None:
    config = OptimizerConfig(learning_rate=2e-6, schedule="linear")
    assert learning_rate(config, 1, 3) == pytest.approx(1e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_a_run_that_is_all_warm_up_or_one_step(schedule: str) -> None:
    assert rates(2, schedule=schedule, warmup_steps=2) == [0.5, 1.0]
    assert rates(1, schedule=schedule, final_ratio=0.1) == [1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_after_the_last_step_the_rate_stays(schedule: str) -> None:
    config = OptimizerConfig.model_validate(
        {"learning_rate": 1.0, "schedule": schedule, "final_ratio": 0.3}
    )
    assert learning_rate(config, 9, 4) == pytest.approx(0.3)
