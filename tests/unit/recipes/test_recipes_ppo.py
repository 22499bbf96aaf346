"""The KL coefficient that PPO begins with, anew and after a checkpoint."""

from __future__ import annotations

import pytest

from plimsoll.config.algorithm import KlConfig
from plimsoll.recipes.ppo import first_kl_coefficient
from plimsoll.run.state import RunState


@pytest.mark.parametrize(
    ("step", "target", "expected"), [(0, None, 0.5), (0, 6.0, 0.5), (7, None, 0.5), (7, 6.0, 0.02)]
)
def test_only_an_adaptive_coefficient_goes_on_from_its_checkpoint(
    step: int, target: float | None, expected: float
) -> None:
    state = RunState(
        step=step, data_position=0, weight_version=step, kl_coefficient=0.02, seconds=0.0
    )
    assert first_kl_coefficient(KlConfig(coefficient=0.5, target=target), state) == expected
