"""Reward functions in files of verl's form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import ConfigError
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.reward.adapters import reward_function
from plimsoll.reward.score import open_rewards

FILE = """
{DEF} compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    found = len(data_source) * 100 + len(solution_str) * 10 + (ground_truth == "42")
    return {GIVES}

def other(data_source, solution_str, ground_truth, extra_info):
    return -1.0 if extra_info is None else extra_info["index"]
"""


def trajectory(response: str, reference: str | None, **columns: object) -> Trajectory:
    asked = Prompt(0, np.array([1], np.int64), "q", reference, source="gsm8k", columns=columns)
    return single_turn(asked, 0, np.array([2]), np.zeros(1, np.float32), response, "stop", 0)


def rewards_of(path: Path, *trajectories: Trajectory, **options: str) -> list[float]:
    config = RewardConfig(name="verl_function", options={"path": str(path), **options})
    with open_rewards({"mine": config}) as scorer:
        return [one.rewards[0].value for one in scorer(trajectories)]


@pytest.mark.parametrize(
    ("begun", "gives"),
    [("def", "found"), ("def", "{'score': found, 'acc': 0}"), ("async def", "found")],
)
def test_a_function_gets_what_verl_gives_it(begun: str, gives: str, tmp_path: Path) -> None:
    file = tmp_path / "score.py"
    file.write_text(FILE.replace("{DEF}", begun).replace("{GIVES}", gives))
    found = rewards_of(file, trajectory("abc", "42"), trajectory("", None))
    assert found == [5 * 100 + 3 * 10 + 1, 500]


def test_its_name_may_be_another_and_it_sees_extra_info(tmp_path: Path) -> None:
    file = tmp_path / "score.py"
    file.write_text(FILE.replace("{DEF}", "def").replace("{GIVES}", "found"))
    asked = (trajectory("a", None), trajectory("a", None, extra_info={"index": 7}))
    assert rewards_of(file, *asked, function="other") == [-1.0, 7.0]


def test_a_misspelt_name_is_reported_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'verl_function'"):
        reward_function(RewardConfig(name="verl_functon"))


def test_a_function_of_this_form_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FILE.replace("{DEF}", "def").replace("{GIVES}", "found"))
    with open_rewards({"mine": RewardConfig(name=f"{tmp_path}/own.py:other")}) as scorer:
        [scored] = scorer([trajectory("a", None, extra_info={"index": 7})])
    assert scored.rewards[0].value == 7.0


def test_a_function_that_cannot_take_what_verl_gives_is_refused_before_a_run(
    tmp_path: Path,
) -> None:
    file = tmp_path / "score.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth): ...\n")
    with pytest.raises(ConfigError, match=r"extra_info.*or \*\*kwargs"):
        reward_function(RewardConfig(name=f"{file}:compute_score"))
