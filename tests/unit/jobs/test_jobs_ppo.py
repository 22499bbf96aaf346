"""What PPO begins with, new or resumed: the KL coefficient, and the actor's learning rate."""

from __future__ import annotations

import pytest

from plimsoll.config.rl import AdaptiveKlConfig, KlConfig, RlConfig
from plimsoll.jobs.rl_loop import first_kl_coefficient
from plimsoll.jobs.which import spec_of
from plimsoll.rl.batch import rate_of
from plimsoll.run.state import RunState


@pytest.mark.parametrize(
    ("step", "target", "expected"), [(0, None, 0.5), (0, 6.0, 0.5), (7, None, 0.5), (7, 6.0, 0.02)]
)
def test_only_an_adaptive_coefficient_goes_on_from_its_checkpoint(
    step: int, target: float | None, expected: float
) -> None:
    state = RunState(
        step=step,
        data_position=0,
        data_rows=0,
        weight_version=step,
        kl_coefficient=0.02,
        seconds=0.0,
    )
    adaptive = None if target is None else AdaptiveKlConfig(target=target)
    assert first_kl_coefficient(KlConfig(coefficient=0.5, adaptive=adaptive), state) == expected


def test_the_actors_schedule_begins_with_its_own_first_step() -> None:
    """Two steps of the critic alone, then 3 steps of 2 updates: 4 of them rise, the last falls."""
    config = RlConfig.model_validate(
        {
            "run": {"directory": "runs/x", "steps": 5},
            "data": {"train": {"path": "x.jsonl", "prompt": "p"}},
            "batch": {"prompts": 8, "micro_batch_tokens": 20},
            "actor": {
                "model": {"path": "m"},
                "optimizer": {"learning_rate": 4.0, "schedule": "linear", "warmup_steps": 4},
            },
            "critic": {"model": {"path": "m"}},
            "rewards": {"length": {"name": "length"}},
            "algorithm": {"mini_batches": 2, "critic_warmup_steps": 2},
        }
    )
    spec = spec_of(config)
    rates = [rate_of(spec.sender, spec, 2, step, number) for step in (2, 3, 4) for number in (0, 1)]
    assert rates == [1.0, 2.0, 3.0, 4.0, 4.0, 0.0]
