"""A run whose figures and samples are NaN or infinite has its page, its report and its gauges."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plimsoll.algorithm.figures import mean_interval
from plimsoll.commands.rollouts import overview_text
from plimsoll.page.answers import answer, freeze_replies
from plimsoll.page.progress import prometheus_text
from plimsoll.page.serve import RUNS, render_page
from plimsoll.page.watched import Watched, watch_runs
from plimsoll.records import ADVANTAGES, Prompt, RewardPart, Trajectory, single_turn
from plimsoll.rl.batch import trajectory_metrics
from plimsoll.rl.evaluate import mean_rewards
from plimsoll.run.directory import RunDirectory
from plimsoll.run.json_lines import append_row
from plimsoll.run.responses import read_groups, read_some, widest_group
from plimsoll.run.trajectories import write_trajectories

NUMBERS = (nan, inf, -inf, 1.0)
FIGURES = (
    *("reward", "reward/right", "kl", "loss", "eval/reward", "eval/reward_low", "eval/reward_high"),
    *("seconds/rollout", "tokens_per_second", "mfu", "memory_bytes/rank 0"),
)
PAIRS = list(product(NUMBERS, NUMBERS))
"""The rewards of the two responses of each group."""


def response(group: int, sample: int, reward: float) -> Trajectory:
    prompt = Prompt(group, np.array([group]), f"prompt {group}", "ref", "maths")
    made = single_turn(
        prompt=prompt,
        sample_index=sample,
        response_tokens=np.array([1, 2]),
        sampler_logprobs=np.full(2, -inf, dtype=np.float32),
        response_text="text",
        finish_reason="stop",
        weight_version=1,
        rewards=(RewardPart("right", reward, 1.0),),
    )
    return replace(made, group=group)


SAMPLED = [
    response(group, sample, reward)
    for group, pair in enumerate(PAIRS)
    for sample, reward in enumerate(pair)
]


@pytest.fixture(params=NUMBERS, ids=str)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Watched:
    """Return a run whose last figures are all the same number, after steps with the others."""
    directory = RunDirectory(tmp_path)
    directory.write_config("# ppo\nrun: {steps: 9}\n")
    for step, number in enumerate([*NUMBERS, request.param], 1):
        append_row(directory.metrics_path, {"step": step, **dict.fromkeys(FIGURES, number)})
    advantages = {ADVANTAGES: np.array([inf, 1.0], np.float32)}
    scored = [t.add_columns(advantages) for t in SAMPLED]
    write_trajectories(directory.trajectories_path(5), 5, scored)
    (watched,) = watch_runs([tmp_path])
    return watched.look()


def refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def test_a_page_is_strict_json(run: Watched) -> None:
    assert run.problem == ""
    text = render_page("page", freeze_replies([run], []), RUNS)
    (data,) = re.findall(r'id="data">(.*?)</script>', text)
    replies = json.loads(data, parse_constant=refuse_constant)
    rewards = [summary["reward"] for summary in replies["groups?run=0"]["groups"]]
    assert None in rewards
    assert "plimsoll_reward{" in prometheus_text([run])


def test_every_group_is_answered_and_nan_is_never_the_best(run: Watched) -> None:
    for number in range(len(PAIRS)):
        answer([run], "group", {"step": "5", "group": str(number)})
    ends = answer([run], "ends", {"step": "5"})
    assert [item["response"]["reward"] for item in ends["best"]] == [inf] * 3
    assert not any(item["response"]["reward"] == inf for item in ends["worst"])


def test_samples_can_be_chosen_and_shown(run: Watched) -> None:
    path = run.run.trajectories_path(5)
    groups = read_groups(path)
    assert widest_group(groups).spread == inf
    assert {group.spread for group in groups if group.responses[0].reward == 1.0} == {0.0, inf}
    assert read_some(path, 4)[0].reward == inf
    assert "mean reward nan" in overview_text(5, groups, None)


def test_the_means_of_such_rewards_are_nan() -> None:
    assert np.isnan(
        [trajectory_metrics(SAMPLED)[name] for name in ("reward", "reward/right")]
    ).all()
    figures = mean_rewards(SAMPLED)
    assert np.isnan([figures["reward"], figures["reward_low"], figures["reward_high"]]).all()
    assert np.isnan(mean_interval([inf, 1.0], ["a", "b"]) or 0.0).all()
