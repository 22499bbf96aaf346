"""References as rows have them: functions of other systems get them so, rules that compare text do
not, and a server gets both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plimsoll.config.base import OptionValue
from plimsoll.config.reward import RewardConfig
from plimsoll.data.fields import reference_text
from plimsoll.errors import DataError
from plimsoll.interop.rewards.trl import adapt
from plimsoll.records import Prompt, Trajectory, Transcript, single_turn
from plimsoll.reward.score import build_rule, open_rewards
from plimsoll.reward.server_forms import (
    openrlhf_request,
    plain_texts,
    plimsoll_request,
    read_request,
)
from plimsoll.run.trajectories import read_trajectories, write_trajectories

VALUES: list[object] = ["72", 72, 72.0, 0, False, ["Ann", "Al"], {"target": ["Ann"], "n": None}]


def trajectory(reference: object) -> Trajectory:
    """Return the trajectory that a row with this reference gives."""
    text = None if reference is None else reference_text(reference)
    value = None if isinstance(reference, str) else reference
    prompt = Prompt(0, np.array([1], np.int32), "q", text, reference_value=value)
    return single_turn(prompt, 0, np.array([2]), np.zeros(1, np.float32), "r #### 72", "stop", 0)


def rewards_of(name: str, *references: object, **options: OptionValue) -> list[float]:
    config = RewardConfig(name=name, options=options)
    with open_rewards({"mine": config}) as scorer:
        return [one.rewards[0].value for one in scorer(list(map(trajectory, references)))]


def test_functions_of_other_systems_get_what_the_row_has(tmp_path: Path) -> None:
    """The reward is the place of the value among those given, with its type; "" without one."""
    given = [*VALUES, ""]
    find = f"[repr(one) for one in {given!r}].index(repr(REFERENCE))"
    verl, openrlhf = tmp_path / "verl.py", tmp_path / "openrlhf.py"
    verl.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    return {find.replace('REFERENCE', 'ground_truth')}\n"
    )
    openrlhf.write_text(
        "def reward_func(queries, prompts, labels):\n"
        f"    return [{find.replace('REFERENCE', 'label')} for label in labels]\n"
    )
    expected = list(map(float, range(len(given))))
    assert rewards_of("verl_function", *VALUES, None, path=str(verl)) == expected
    assert rewards_of("openrlhf_function", *VALUES, None, path=str(openrlhf)) == expected


def test_functions_of_trls_form_get_what_the_row_has() -> None:
    def reward(completions: list[object], reference: list[object]) -> list[float]:
        return [float(VALUES.index(one)) if one == VALUES[-1] else -1.0 for one in reference]

    episodes = [replace(trajectory(value), transcript=Transcript(None, ())) for value in VALUES]
    assert adapt(reward)(episodes) == [-1.0] * (len(VALUES) - 1) + [float(len(VALUES) - 1)]


def test_a_whole_number_of_a_float_column_is_compared_as_one() -> None:
    assert rewards_of("exact_match", 72.0, 72, "72", "72.0", 7.5) == [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("value", "kind"), [(["72"], "a list"), ({"a": "72"}, "an object"), (True, "true or false")]
)
def test_rules_that_compare_text_refuse_what_is_none(value: object, kind: str) -> None:
    for name in ("exact_match", "math_answer"):
        rule = build_rule("right", RewardConfig(name=name))
        rule.check_reference(72.0)
        with pytest.raises(DataError, match=rf"'right': it is {kind}, and this reward compares"):
            rule.check_reference(value)


def test_tests_of_programs_may_be_lists_and_objects() -> None:
    rule = build_rule("passes", RewardConfig(name="code"))
    for tests in (["assert f(1) == 2"], {"inputs": ["1"], "outputs": ["2"]}, "assert f(1) == 2"):
        rule.check_reference(tests)
    with pytest.raises(DataError, match="there is no test in it"):
        rule.check_reference([])


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_references_cross_to_servers_and_files_as_they_are(value: object, tmp_path: Path) -> None:
    one = trajectory(value)
    for asked in (plimsoll_request([one]), openrlhf_request(plain_texts)([one])):
        [read] = read_request(json.loads(json.dumps(asked)))
        assert (read.prompt.reference, read.prompt.given_reference) == (one.prompt.reference, value)
    write_trajectories(tmp_path / "a.parquet", 1, [one, trajectory("x"), trajectory(None)])
    back = [t.prompt for t in read_trajectories(tmp_path / "a.parquet")]
    assert [p.given_reference for p in back] == [value, "x", None]
    assert [p.reference for p in back] == [one.prompt.reference, "x", None]
