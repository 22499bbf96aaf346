"""Rewards and log-probs that are not finite are found, with their groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plimsoll.errors import PlimsollError
from plimsoll.records import TOKEN_REWARDS, Prompt, RewardPart, Trajectory, single_turn
from plimsoll.rl.bad_numbers import check_rewards
from plimsoll.run.health import BadNumbers, BadSteps


def sampled(group: int, reward: float = 1.0, logprob: float = -0.5) -> Trajectory:
    return single_turn(
        Prompt(10 + group, np.arange(3), "?"),
        0,
        np.arange(2),
        np.array([-0.1, logprob], np.float32),
        "!",
        "stop",
        weight_version=0,
        rewards=(RewardPart("answer", reward), RewardPart("length", 0.0)),
        group=group,
    )


def test_finite_numbers_pass() -> None:
    check_rewards([sampled(0), sampled(1, logprob=-1e4)])


def test_each_figure_is_named_with_its_groups() -> None:
    trajectories = [sampled(0, np.inf), sampled(1), sampled(2, np.nan), sampled(3, logprob=-np.inf)]
    with pytest.raises(BadNumbers) as refusal:
        check_rewards(trajectories)
    rewards, log_probs = refusal.value.figures
    assert rewards.endswith("answer of group 0 (row 10), 2 (row 12)")
    assert log_probs.endswith("log-probs of group 3 (row 13)")


def test_rewards_of_tokens_and_earlier_branches_count() -> None:
    placed = sampled(4).add_columns({TOKEN_REWARDS: np.array([0, np.nan], np.float32)})
    branched = replace(sampled(5), earlier=(sampled(5, logprob=np.nan),))
    with pytest.raises(BadNumbers) as refusal:
        check_rewards([placed, branched])
    log_probs, rewards = refusal.value.figures
    assert rewards.endswith("tokens of group 4 (row 14)")
    assert log_probs.endswith("log-probs of group 5 (row 15)")


def test_many_groups_are_counted() -> None:
    with pytest.raises(BadNumbers, match=r"of group 0 \(row 10\), .*, 4 \(row 14\) and 3 more"):
        check_rewards([sampled(group, np.nan) for group in range(8)])


def test_only_bad_steps_that_follow_one_another_count() -> None:
    counted, dump = BadSteps(most=1), Path("bad/step-000001.parquet")
    for step in (1, 3):
        assert f"step {step} has" in counted.add(step, ["the loss"], dump)
        counted.in_a_row = 0  # a step that was not bad
    counted.add(5, ["the loss"], dump)
    with pytest.raises(PlimsollError, match=r"run\.max_bad_steps allows 1 in a row"):
        counted.add(6, ["the loss"], dump)
