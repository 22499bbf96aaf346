"""What becomes of a value: bounds, normalisation over the run, the factor of what was cut."""

from __future__ import annotations

from random import Random
from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.config.reward import RewardConfig
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.reward.score import RunningMoments, Scorer, open_rewards

LONG = RewardConfig(name="overlong", options={"max_new_tokens": 10, "buffer": 10, "factor": -10.0})
"""Worth as many as there are tokens."""


def trajectory(tokens: int, finish: str = "stop") -> Trajectory:
    prompt = Prompt(0, np.zeros(2, np.int64), "?")
    logprobs, response = np.zeros(tokens, np.float32), np.zeros(tokens, np.int64)
    return single_turn(prompt, 0, response, logprobs, "x", finish, 0)  # type: ignore[arg-type]


def part(**settings: object) -> dict[str, RewardConfig]:
    return {"tokens": LONG.model_copy(update=settings)}


def test_a_value_is_clipped_and_multiplied_where_the_response_was_cut() -> None:
    given = [trajectory(1), trajectory(5), trajectory(9), trajectory(9, "length")]
    with open_rewards(part(clip=(2.0, 6.0), truncated_factor=0.5)) as scorer:
        assert [t.rewards[0].value for t in scorer(given)] == [2.0, 5.0, 6.0, 3.0]


def normalised(scorer: Scorer, *tokens: int) -> list[float]:
    found = scorer([trajectory(n) for n in tokens])
    assert [t.rewards[0].value for t in found] == list(tokens)
    scorer.observe(found)
    return [t.rewards[0].value for t in scorer.normalize(found)]


def test_values_are_normalised_over_the_run_when_a_step_is_settled() -> None:
    """1, 3: mean 2, deviation sqrt(2). With 5, 7: mean 4, deviation sqrt(20 / 3)."""
    with open_rewards(part(normalize=True)) as scorer:
        assert normalised(scorer, 1, 3) == pytest.approx([-(0.5**0.5), 0.5**0.5])
        deviation = (20 / 3) ** 0.5
        assert normalised(scorer, 5, 7) == pytest.approx([1 / deviation, 3 / deviation])
        (greedy,) = scorer.normalize(scorer([trajectory(4)]))  # looked at, and not taken in
        assert greedy.rewards[0].value == 0.0
        state = scorer.state()
    assert state == {"tokens": {"count": 4.0, "mean": 4.0, "squares": 20.0}}
    with open_rewards(part(normalize=True)) as resumed:
        resumed.restore(state)
        assert normalised(resumed, 4) == [0.0]
        assert resumed.state()["tokens"]["count"] == 5.0
    with open_rewards(part()) as plain:
        plain.restore(state)
        assert plain.state() == {}


def test_equal_values_are_worth_nothing() -> None:
    with open_rewards(part(normalize=True)) as scorer:
        assert normalised(scorer, 3, 3, 3) == [0.0] * 3


@given(st.lists(st.integers(1, 10), min_size=1, max_size=9), st.randoms())
def test_a_step_is_normalised_alike_whatever_was_scored_first(
    tokens: list[int], random: Random
) -> None:
    """Responses are scored one by one, in any order; the step is settled in the prompts' order."""
    parts, order = part(normalize=True), random.sample(range(len(tokens)), len(tokens))
    with open_rewards(parts) as scorer, open_rewards(parts) as other:
        wanted = normalised(scorer, *tokens)
        came = {place: other([trajectory(tokens[place])])[0] for place in order}
        settled = [came[place] for place in range(len(tokens))]
        other.observe(settled)
        assert [t.rewards[0].value for t in other.normalize(settled)] == wanted
        assert other.state() == scorer.state()


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), min_size=1, max_size=6))
def test_the_statistics_are_those_of_all_values_however_they_came(parts: list[list[float]]) -> None:
    running, values = RunningMoments(), [value for part in parts for value in part]
    for part in parts:
        running.add(part)
    if len(values) > 1:
        state = running.state()
        assert state["mean"] == pytest.approx(mean(values), abs=1e-9)
        deviation = (state["squares"] / (state["count"] - 1)) ** 0.5
        assert deviation == pytest.approx(stdev(values), abs=1e-6)
