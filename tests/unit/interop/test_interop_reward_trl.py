"""Reward functions of TRL's form: what they are given, and where they are refused."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from plimsoll.config.reward import RewardConfig
from plimsoll.config.rollout import EnvironmentConfig
from plimsoll.errors import ConfigError
from plimsoll.interop.rewards.trl import ADAPTER, adapt
from plimsoll.records import WEIGHT_VERSIONS, Prompt, Trajectory, Transcript, single_turn
from plimsoll.reward.functions import takes_many
from plimsoll.reward.references import check_columns, check_rewards


def episode(place: int, **columns: object) -> Trajectory:
    asked = {"role": "user", "content": f"Game {place}."}
    prompt = Prompt(place, np.array([1]), "", "right", columns=columns, messages=(asked,))
    said = ({"role": "assistant", "content": "Yes."},)
    tokens = np.array([place, 7])
    found = single_turn(prompt, 0, tokens, np.zeros(2, np.float32), "Yes.", "stop", 0)
    return replace(found, transcript=Transcript(f"environment {place}", said))


EPISODES = [episode(3, level=1), episode(4, level=2, extra="x")]


def scored(function: Callable[..., Any]) -> Any:
    assert ADAPTER.recognises(inspect.signature(function).parameters)
    reward = adapt(function)
    assert takes_many(partial(reward))
    given = reward(EPISODES)
    return asyncio.run(given) if inspect.iscoroutinefunction(reward) else given


def test_all_is_handed_over_to_who_takes_all() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, **kwargs: Any) -> list[float | None]:
        seen.update(kwargs, prompts=prompts, completions=completions)
        return [0.5, None]

    assert scored(reward) == [0.5, 0.0]
    assert seen.pop("trainer_state").global_step == 0
    assert seen.pop("log_metric")("a", 1.0) is seen.pop("log_extra")("b", [1.0]) is None
    assert seen == {
        "prompts": [[{"role": "user", "content": f"Game {i}."}] for i in (3, 4)],
        "completions": [[{"role": "assistant", "content": "Yes."}]] * 2,
        "completion_ids": [[3, 7], [4, 7]],
        "environments": ["environment 3", "environment 4"],
        "reference": ["right", "right"],
        "level": [1, 2],
        "extra": [None, "x"],
    }


def test_columns_that_settings_name_come_by_their_own_names() -> None:
    """Beside these, the reference comes as `reference`, unless the rows have such a column."""

    def reward(completions: Any, answer: Any = None, **kwargs: Any) -> list[float]:
        return [float(a == "right" == r) for a, r in zip(answer, kwargs["reference"], strict=True)]

    def own(completions: Any, reference: Any) -> list[float]:
        return [float(one) for one in reference]

    named = [
        replace(e, prompt=replace(e.prompt, named={"answer": "right", "question": "?"}))
        for e in EPISODES
    ]
    assert adapt(reward)(named) == [1.0, 1.0]
    with_own = [
        replace(e, prompt=replace(e.prompt, columns={"reference": n}))
        for n, e in enumerate(EPISODES)
    ]
    assert adapt(own)(with_own) == [0.0, 1.0]


def test_the_step_is_the_version_of_the_weights() -> None:
    def reward(completions: Any, trainer_state: Any) -> list[float]:
        return [float(trainer_state.global_step)] * len(completions)

    later = [e.add_columns({WEIGHT_VERSIONS: e.weight_versions + 7}) for e in EPISODES]
    assert adapt(reward)(later) == [7.0, 7.0]

    def other(completions: Any, trainer_state: Any) -> list[float]:
        return [trainer_state.max_steps] * len(completions)

    with pytest.raises(AttributeError, match=r"'max_steps'.*global_step"):
        adapt(other)(later)


def test_columns_that_must_be_there_are_checked_before_a_run(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "def reward(completions, answer, trainer_state, reference, level=1, **more):\n"
        "    return [0.0] * len(completions)\n"
    )
    rewards = {"own": RewardConfig(name=f"{tmp_path}/mine.py:reward")}
    assert [*check_columns(rewards, {"data.train": ("answer", "question")})] == []
    [problem] = check_columns(rewards, {"data.train": ("answers", "question")})
    assert re.search("'answer'.*answers, question", problem.why)


def test_one_that_names_what_it_takes_gets_that() -> None:
    async def reward(environments: Any, level: Any, scale: float = 2.0) -> list[float]:
        return [scale * one + len(env) for one, env in zip(level, environments, strict=True)]

    assert scored(reward) == [15.0, 17.0]


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    def reward(completions: Any, solution: Any) -> list[float]:
        return []

    with pytest.raises(ConfigError, match=r"'solution'.* level, extra\b"):
        scored(reward)


def test_what_is_no_list_is_for_others_to_refuse() -> None:
    assert scored(lambda completions: 3) == 3
    assert scored(lambda completions: "ab") == "ab"


@pytest.mark.parametrize("is_text", [True, False])
def test_without_environments_they_are_given_what_the_rows_hold(is_text: bool) -> None:
    """TRL gives texts of a column of texts, and conversations of a column of messages."""
    seen: dict[str, Any] = {}

    def reward(completions: Any, prompts: Any, **kwargs: Any) -> list[float]:
        seen.update(kwargs, prompts=prompts, completions=completions)
        return [float(len(one)) for one in completions]

    asked = {"role": "user", "content": "Two?"}
    prompt = Prompt(0, np.array([1]), "Two?", "2", messages=(asked,), is_text=is_text)
    answered = single_turn(prompt, 0, np.array([7]), np.zeros(1, np.float32), "Yes.", "stop", 0)
    assert adapt(reward)([answered]) == ([4.0] if is_text else [1.0])
    if is_text:
        assert (seen["prompts"], seen["completions"]) == (["Two?"], ["Yes."])
    else:
        said = {"role": "assistant", "content": "Yes."}
        assert (seen["prompts"], seen["completions"]) == ([[asked]], [[said]])
    assert (seen["reference"], "environments" in seen) == (["2"], False)


TRLS = """
def of_all(completions, **kwargs):
    return [0.0] * len(completions)

def of_environments(environments, **kwargs):
    return [0.0] * len(environments)
"""


@pytest.mark.parametrize(
    ("name", "changed", "environment", "said"),
    [
        ("of_all", {}, None, None),
        ("of_all", {"process": True}, None, None),
        ("of_environments", {}, None, "the config has none"),
        ("of_all", {"process": True}, {}, "in the process that plays them"),
        ("of_environments", {}, {"process": True}, "environments.game are in processes"),
        ("of_all", {}, {"process": True}, None),
        ("of_environments", {}, {}, None),
    ],
)
def test_where_the_form_cannot_be_used(
    name: str,
    changed: dict[str, Any],
    environment: dict[str, Any] | None,
    said: str | None,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "trls_rewards.py").write_text(TRLS)
    monkeypatch.syspath_prepend(tmp_path)
    environments = {}
    if environment is not None:
        environments["game"] = EnvironmentConfig(name="guess_number", **environment)
    part = RewardConfig(name=f"trls_rewards:{name}", **changed)
    found = [*check_rewards({"own": part}, environments)]
    assert [one.code for one in found] == ([] if said is None else ["reward-settings"])
    assert said is None or said in found[0].why
