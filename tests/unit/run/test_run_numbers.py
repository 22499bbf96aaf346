"""Numbers that are NaN or infinite: their mean, their order, and their JSON."""

from __future__ import annotations

import json
from math import inf, isnan, nan

import pytest

from plimsoll.run.numbers import mean, rank, strict_json


def test_a_mean_is_a_number_for_any_values() -> None:
    assert mean(iter([1.0, 2.0])) == 1.5
    assert mean([inf, 1.0]) == inf
    assert isnan(mean([nan, 1.0]))
    assert isnan(mean([inf, -inf, 1.0]))


def test_nan_is_sorted_below_all_numbers() -> None:
    assert sorted([1.0, nan, -2.0, inf], key=lambda value: -rank(value))[:3] == [inf, 1.0, -2.0]


@pytest.mark.parametrize("number", [nan, inf, -inf])
def test_json_has_null_for_what_it_cannot_carry(number: float) -> None:
    text = strict_json({"a": [number, (number, 1.5)], "b": {"c": number, "ä": "<"}})
    assert json.loads(text) == {"a": [None, [None, 1.5]], "b": {"c": None, "ä": "<"}}
