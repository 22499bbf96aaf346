"""Answers to tasks of reasoning-gym, by the tasks' own scores."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from plimsoll.config.data import GenerateConfig, SourceConfig
from plimsoll.data.fields import RawRow
from plimsoll.data.generated import INSTALL, LIBRARY
from plimsoll.data.sources import read_rows
from plimsoll.errors import DataError
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.reward.reasoning_gym import answer, reward


@pytest.mark.parametrize(
    ("response", "tag", "expected"),
    [
        ("<answer> 7 </answer>", "answer", "7"),
        ("<answer>6</answer> no: <answer>7\n8</answer>", "answer", "7\n8"),
        ("it is 7", "answer", None),
        ("<answer>7", "answer", None),
        ("<out>7</out>", "out", "7"),
        (" it is 7 ", "", "it is 7"),
    ],
)
def test_the_answer_of_a_response(response: str, tag: str, expected: str | None) -> None:
    assert answer(response, tag=tag) == expected


def said(text: str, columns: dict[str, Any]) -> Trajectory:
    prompt = Prompt(0, np.array([1], np.int32), "?", columns=columns)
    nothing = np.zeros(1, np.float32)
    return single_turn(prompt, 0, np.array([1]), nothing, text, "stop", weight_version=0)


def test_other_rows_have_no_score() -> None:
    with pytest.raises(DataError, match=r"data\.train\.generate"):
        reward(said("7", {}))


@pytest.mark.skipif(
    importlib.util.find_spec(LIBRARY) is None, reason=f"reasoning-gym is not installed: {INSTALL}"
)
def test_scores_are_the_tasks_own() -> None:
    """rearc scores by tuples, decimal_arithmetic by its options, knights_knaves by NumPy's texts.
    prime_factorization raises for what is no number."""
    tasks = {
        "chain_sum": {},
        "rearc": {},
        "knights_knaves": {},
        "prime_factorization": {},
        "decimal_arithmetic": {"max_num_decimal_places": 2, "min_num_decimal_places": 1},
    }
    generate = GenerateConfig.model_validate({"tasks": tasks, "size": 2, "seed": 3})
    found = list(read_rows(SourceConfig(path=LIBRARY, prompt="question", generate=generate)))
    assert len(found) == 10
    for row in found:
        assert isinstance(row, RawRow)
        columns = {LIBRARY: row.values[LIBRARY]}
        right = row.values["answer"]
        assert reward(said(f"I think <answer>{right}</answer>", columns)) == 1.0
        assert reward(said(str(right), columns), tag="") == 1.0
        assert reward(said("<answer>no number</answer>", columns)) < 0.2
        assert reward(said("no answer", columns)) < 0.2
