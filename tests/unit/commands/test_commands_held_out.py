"""Held-out figures as numbers."""

from __future__ import annotations

from math import nan
from typing import Any

from plimsoll.page.curves import (
    bounds_text,
    evaluations,
    held_out_figures,
    number_text,
)
from plimsoll.run.displays import Figure

ROWS: list[dict[str, Any]] = [
    {"step": 0, "eval/reward": 0.25, "eval/reward_low": 0.125, "eval/reward_high": 0.5},
    {"step": 1, "reward": 0.5},
    {"step": 2, "eval/reward": 0.75, "eval/reward_low": 0.5, "eval/reward_high": 1.0},
    {"step": 4, "eval/reward": 0.5, "eval/reward_low": None, "eval/reward_high": 1.0, "eval/x": 7},
]


def test_the_first_the_best_and_the_last_evaluation_are_shown() -> None:
    assert evaluations(ROWS, 2) == {
        "first, step 0": ROWS[0],
        "best, step 2": ROWS[2],
        "last, step 4": ROWS[3],
    }


def test_none_is_shown_twice() -> None:
    assert list(evaluations(ROWS, None)) == ["first, step 0", "last, step 4"]
    assert list(evaluations(ROWS, 4)) == ["first, step 0", "best and last, step 4"]
    assert list(evaluations(ROWS, 3)) == ["first, step 0", "last, step 4"]
    assert list(evaluations(ROWS[:2], 0)) == ["step 0"]
    assert evaluations(ROWS[1:2], None) == {}


def test_a_number_has_its_interval_and_bounds_are_no_rows() -> None:
    found = held_out_figures([ROWS[0], ROWS[3]])
    assert list(found) == ["eval/reward", "eval/x"]
    texts = [
        [one and (number_text(one), bounds_text(one)) for one in own] for own in found.values()
    ]
    assert texts == [[("0.25", "0.125 to 0.5"), ("0.5", "")], [None, ("7", "")]]


def test_a_name_that_ends_like_a_bound_is_a_number_of_its_own_without_the_other_bound() -> None:
    row = {"step": 1, "eval/price": 3.0, "eval/price_low": 2.0}
    assert held_out_figures([row]) == {
        "eval/price": [Figure(3.0)],
        "eval/price_low": [Figure(2.0)],
    }


def test_what_is_no_number_is_said() -> None:
    ((figure,),) = held_out_figures([{"step": 1, "eval/loss": None}]).values()
    assert figure is not None and number_text(figure) == number_text(Figure(nan)) == "NaN"
