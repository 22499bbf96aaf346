"""Which evaluation is the best, and when patience is out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from plimsoll.config.run import BestConfig
from plimsoll.errors import ConfigError
from plimsoll.run.state import RunState, after_evaluation, is_patience_out

START = RunState(
    step=0, data_position=0, data_rows=0, weight_version=0, kl_coefficient=0.0, seconds=0.0
)


def follow(config: BestConfig, values: list[float]) -> list[tuple[float | None, int, int]]:
    """(best, its step, evaluations since) after an evaluation at each of steps 1, 2, ..."""
    state, seen = START, []
    for step, value in enumerate(values, start=1):
        state = after_evaluation(config, replace(state, step=step), {config.metric: value})
        seen.append((state.best, state.best_step, state.evaluations_since_best))
    return seen


def test_the_lowest_is_the_best() -> None:
    assert follow(BestConfig(), [3.0, 2.0, 2.5, 2.0, 1.0]) == [
        (3.0, 1, 0),
        (2.0, 2, 0),
        (2.0, 2, 1),
        (2.0, 2, 2),
        (1.0, 5, 0),
    ]


def test_the_highest_is_the_best() -> None:
    config = BestConfig(metric="eval/accuracy", goal="highest")
    assert follow(config, [0.5, 0.4, 0.6])[-1] == (0.6, 3, 0)


def test_a_gain_must_be_over_min_delta() -> None:
    """1.0, then 0.5 less, which is not more than 0.5, then 0.75 less than the best."""
    seen = follow(BestConfig(min_delta=0.5), [1.0, 0.5, 0.25])
    assert seen == [(1.0, 1, 0), (1.0, 1, 1), (0.25, 3, 0)]


def test_what_is_not_a_number_is_never_the_best() -> None:
    assert follow(BestConfig(), [math.nan, 2.0, math.nan]) == [
        (None, 0, 1),
        (2.0, 2, 0),
        (2.0, 2, 1),
    ]


def test_a_metric_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"'eval/accuracy'.*: eval/loss, eval/perplexity\."):
        after_evaluation(
            BestConfig(metric="eval/accuracy"),
            START,
            {"loss": 1.0, "eval/perplexity": 2.7, "eval/loss": 1.0},
        )


@pytest.mark.parametrize(("patience", "out"), [(1, True), (2, True), (3, False), (None, False)])
def test_patience(patience: int | None, out: bool) -> None:
    state = replace(START, best=1.0, best_step=4, evaluations_since_best=2)
    assert is_patience_out(BestConfig(patience=patience), state) is out
    assert not is_patience_out(None, state)
