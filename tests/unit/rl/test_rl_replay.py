"""What a run that replays is, and which stored steps it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plimsoll.config.rl import RlConfig
from plimsoll.errors import ConfigError
from plimsoll.jobs.which import spec_of
from plimsoll.records import SAMPLER_LOGPROBS, WEIGHT_VERSIONS, Prompt, RewardPart, Trajectory
from plimsoll.resolve.rules.stored import check_replayed
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.rl.replay import _check_step
from plimsoll.run.directory import RunDirectory
from plimsoll.run.trajectories import write_trajectories


def replay_of(path: Path | None, *, run: dict[str, Any] | None = None) -> RunSpec[RlConfig]:
    """Return a replay of two prompts with two responses of at most three tokens each, two steps
    long."""
    config = {
        "run": {"directory": "runs/x", **(run or {"steps": 2})},
        "data": {"train": {"path": "x.jsonl", "prompt": "p"}, "max_tokens": 2},
        "batch": {"prompts": 2, "responses": 2},
        "actor": {"model": {"path": "m"}},
        "reward_model": {"role": {"model": {"path": "r"}}},
        "rollout": {
            "sampling": {"max_new_tokens": 3, "temperature": 0.7},
            "replay": None if path is None else str(path),
        },
        "algorithm": {"advantage": {"name": "grpo"}},
    }
    return spec_of(RlConfig.model_validate(config))


def trajectory(group: int, tokens: int = 3, prompt: int = 2) -> Trajectory:
    return Trajectory(
        prompt=Prompt(group, np.arange(prompt, dtype=np.int32), "p", None),
        group=group,
        sample_index=0,
        response_tokens=np.arange(tokens),
        loss_mask=np.ones(tokens, np.bool_),
        columns={
            SAMPLER_LOGPROBS: np.zeros(tokens, np.float32),
            WEIGHT_VERSIONS: np.zeros(tokens, np.int64),
        },
        response_text="r",
        finish_reason="stop",
        rewards=(RewardPart("reward_model", 1.0, 1.0),),
    )


def store(run: Path, step: int, *groups: int) -> None:
    path = RunDirectory(run).trajectories_path(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_trajectories(path, step, [trajectory(group) for group in groups])


def test_a_replay_has_no_engines_no_reward_models_and_the_same_temperature(tmp_path: Path) -> None:
    live, replay = replay_of(None), replay_of(tmp_path)
    assert live.engines is not None
    assert replay.engines is None
    assert set(live.roles) - set(replay.roles) == {"reward"}
    assert live.phases - replay.phases == {"rollout", "sync"}
    assert replay.sampling is not None
    assert replay.sampling.rollout.sampling.temperature == 0.7


def test_whole_steps_are_taken(tmp_path: Path) -> None:
    store(tmp_path, 1, 0, 0, 1, 1)
    store(tmp_path, 2, 0, 0, 2, 2)
    assert not list(check_replayed(replay_of(tmp_path)))
    assert not list(check_replayed(replay_of(tmp_path, run={"epochs": 1})))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ({1: (0, 0, 1, 1)}, "not of step 2"),
        ({2: (0, 0, 1, 1)}, "not of step 1"),
        ({1: (0, 0, 1, 1), 2: (0, 0, 1)}, "has 3 trajectories"),
    ],
)
def test_other_steps_are_refused(
    tmp_path: Path, steps: dict[int, tuple[int, ...]], message: str
) -> None:
    for step, groups in steps.items():
        store(tmp_path, step, *groups)
    (problem,) = check_replayed(replay_of(tmp_path))
    assert message in problem.why


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    store(tmp_path, 1, 0, 0, 1, 1)
    RunDirectory(tmp_path).trajectories_path(2).write_text("half")
    (problem,) = check_replayed(replay_of(tmp_path))
    assert "cannot be read" in problem.why


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([trajectory(0)] * 3 + [trajectory(1)], "2 groups of 1 to 3 responses"),
        ([trajectory(0)] * 2 + [trajectory(1), trajectory(1, tokens=4)], "a response of 4 tokens"),
        ([trajectory(0)] * 2 + [trajectory(1, prompt=3)] * 2, "a prompt of 3 tokens"),
    ],
)
def test_a_step_that_is_not_as_planned_is_refused(found: list[Trajectory], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _check_step(found, 1, replay_of(Path("runs/rl")))
