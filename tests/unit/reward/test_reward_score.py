from __future__ import annotations

import gc
import pickle
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.config.base import OptionValue
from plimsoll.config.reward import RewardConfig
from plimsoll.errors import ConfigError, DataError, FunctionFailed, PlimsollError
from plimsoll.records import Prompt, RewardPart, Trajectory, single_turn
from plimsoll.reward import score
from plimsoll.reward.score import build_rule, open_rewards

MODULE = """
import asyncio, math, os, signal, time
import numpy, torch
from plimsoll.reward.references import checks_references
def ratio(trajectory, *, over: int = 10):
    return len(trajectory.response_text) / over
def is_short(trajectory):
    return len(trajectory.response_text) < 10
def fails(trajectory):
    return {}["missing"]
def gives_nan(trajectory):
    return math.nan
def gives_text(trajectory):
    return "0.5"
def gives_none(trajectory):
    pass
def gives_too_much(trajectory):
    return 10**400
def gives_a_number_that_cannot_be_shown(trajectory):
    return 10**5000
def gives_numbers(trajectory):
    return torch.tensor([0.5, 1.0])
def gives_one_of_torch(trajectory):
    return torch.tensor(0.5)
def gives_one_of_numpy(trajectory):
    return numpy.bool_(True)
def leaves(trajectory):
    raise SystemExit(0)
def is_cancelled(trajectory):
    raise asyncio.CancelledError
class Wordless(Exception):
    def __str__(self):
        raise RuntimeError
def fails_without_words(trajectory):
    raise Wordless
def is_interrupted(trajectory):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
    return 1.0
def is_one_of(reference, *, letters: str = "ABCD"):
    if reference not in letters:
        raise ValueError(f"{reference!r} is none of {letters}")
@checks_references(is_one_of)
def picks(trajectory, *, letters: str = "ABCD", lenient: bool = False):
    return trajectory.response_text == trajectory.prompt.reference
@checks_references(lambda reference: 1 / 0)
def checks_wrongly(trajectory):
    return 1.0
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rewards"


def trajectory(response: str, reference: str | None = "72") -> Trajectory:
    tokens = np.zeros(2, dtype=np.int64)
    prompt = Prompt(41, tokens, "?", reference)
    logprobs = np.zeros(2, dtype=np.float32)
    return single_turn(prompt, 0, tokens, logprobs, response, "stop", weight_version=0)


def config(name: str, weight: float = 1.0, **options: OptionValue) -> RewardConfig:
    return RewardConfig(name=name, weight=weight, options=options, retries=0)


def scored(
    rewards: Mapping[str, RewardConfig], trajectories: Sequence[Trajectory]
) -> list[Trajectory]:
    with open_rewards(rewards) as scorer:
        return scorer(trajectories)


def test_parts_are_in_the_order_of_the_config_with_their_weights(module: str) -> None:
    rewards = {
        "right": config("math_answer", 2.0),
        "form": config("pattern", 0.5, pattern=r"#### \d+", full=True),
        "own": config(f"{module}:ratio", -1.0, over=14),
        "short": config(f"{module}:is_short"),
    }
    before = trajectory("#### 72")
    with open_rewards(rewards) as scorer:
        (after,) = scorer([before])
        assert scorer([after])[0].rewards == after.rewards  # scored anew, not twice
    assert after.rewards == (
        RewardPart("right", 1.0, 2.0),
        RewardPart("form", 1.0, 0.5),
        RewardPart("own", 0.5, -1.0),
        RewardPart("short", 1.0),
    )
    assert after.reward == 2.0 + 0.5 - 0.5 + 1.0
    assert before.rewards == ()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("fails", "raised KeyError: 'missing'"),
        ("gives_nan", "gave nan (float)"),
        ("gives_text", "gave '0.5' (str)"),
        ("gives_none", "gave None (NoneType)"),
        ("gives_too_much", f"gave 1{'0' * 199}... (int)"),
        ("gives_a_number_that_cannot_be_shown", "gave <int object at "),
        ("gives_numbers", "gave tensor([0.5000, 1.0000]) (Tensor)"),
        ("leaves", "raised SystemExit: 0."),
        ("is_cancelled", "raised asyncio.exceptions.CancelledError."),
        ("fails_without_words", "raised my_rewards.Wordless"),
    ],
)
def test_a_rule_that_fails_names_itself_row_prompt_and_response(
    module: str, function: str, why: str
) -> None:
    with pytest.raises(PlimsollError) as caught:
        scored({"mine": config(f"{module}:{function}")}, [trajectory("a" * 300 + "b")])
    message = str(caught.value)
    facts = (f"'mine' ({module}:{function})", "row 41 (from 0)", "data.train", why, "prompt: '?'")
    assert all(fact in message for fact in facts)
    assert f"(cut): '{'a' * 200}'" in message and "a" * 201 not in message
    pickle.loads(pickle.dumps(caught.value))  # noqa: S301  it crosses processes


@pytest.mark.parametrize("function", ["fails", "gives_nan"])
def test_a_held_out_row_that_fails_is_named_by_its_key(module: str, function: str) -> None:
    with (
        open_rewards({"mine": config(f"{module}:{function}")}) as scorer,
        pytest.raises(PlimsollError, match=r", at row 41 \(from 0\) of data\.eval "),
    ):
        scorer.of_held_out()([trajectory("a")])


def test_a_rule_looks_at_references_with_its_own_options(module: str) -> None:
    rewards = {"right": config(f"{module}:picks", lenient=True)}
    with open_rewards(rewards | {"short": config(f"{module}:is_short")}) as scorer:
        scorer.check_reference("D")
        with pytest.raises(DataError, match="reward 'right': 'E' is none of"):
            scorer.check_reference("E")
    build_rule("right", config(f"{module}:picks", letters="E")).check_reference("E")
    build_rule("form", config("pattern", pattern="x")).check_reference("whatever")


def test_the_pages_reward_looks_at_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "extend.md").read_text()
    section = page.partition("### Which references a reward can use")[2]
    (tmp_path / "page_rewards.py").write_text(section.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    rewards = {"letter": config("page_rewards:picks", lenient=True)}
    scorer = build_rule("letter", rewards["letter"])
    assert scored(rewards, [trajectory("b", reference="B")])[0].rewards[0].value == 1.0
    scorer.check_reference("B")
    with pytest.raises(DataError, match="'BC' is none of ABCD"):
        scorer.check_reference("BC")


def test_rules_of_the_house_look_at_references() -> None:
    exact = build_rule("same", config("exact_match", marker="="))
    exact.check_reference("#### 72")
    with pytest.raises(DataError, match=r"reward 'same': '1=1' .*marker '='"):
        exact.check_reference("1=1")
    with pytest.raises(DataError, match="reward 'right': 'Friday' is no"):
        build_rule("right", config("math_answer", answer_line=True)).check_reference("Friday")


def test_a_check_of_references_that_fails_names_the_reference(module: str) -> None:
    scorer = build_rule("mine", config(f"{module}:checks_wrongly"))
    with pytest.raises(FunctionFailed) as caught:
        scorer.check_reference("a" * 300)
    message = str(caught.value)
    where = rf"reward 'mine' \({module}:checks_wrongly\)"
    assert re.search(rf"{where} .*ZeroDivisionError.*reference \(cut\): 'aaa", message)


def test_ctrl_c_in_a_rule_is_no_failure_of_it(module: str) -> None:
    gc.disable()  # what is raised while garbage is collected is lost: hypothesis listens to that
    # A shell has what it starts in the background (`make test &`) ignore SIGINT, and Python then
    # raises nothing.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            scored({"mine": config(f"{module}:is_interrupted")}, [trajectory("a")])
    finally:
        signal.signal(signal.SIGINT, before)
        gc.enable()


def test_one_number_of_torch_or_numpy_is_a_reward(module: str) -> None:
    names = ("gives_one_of_torch", "gives_one_of_numpy")
    rewards = {name: config(f"{module}:{name}") for name in names}
    assert [part.value for part in scored(rewards, [trajectory("a")])[0].rewards] == [0.5, 1.0]


def test_a_known_error_keeps_its_kind_and_gains_the_row() -> None:
    with pytest.raises(DataError, match=r"'right'.* row 41 \(from 0\) .*data\.train"):
        scored({"right": config("math_answer")}, [trajectory("#### 72", reference=None)])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (config("math_anser"), "'math_answer'"),
        (config("pattern"), "needs the option 'pattern'"),
        (config("pattern", pattern=5), "'pattern' is 5"),
        (config("length", valu=1.0), "'value'"),
        (config("math_answer", max_characters=0), "'max_characters'"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_before_the_run(
    given: RewardConfig, why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_rule("part", given)
    assert "rewards.part" in str(caught.value) and why in str(caught.value)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=5), st.sampled_from(["stop", "length"]))
def test_the_reward_is_the_weighted_sum(weights: list[float], finish: str) -> None:
    rewards = {f"part {i}": config("pattern", w, pattern="x") for i, w in enumerate(weights)}
    right, wrong = scored(rewards, [trajectory("x"), trajectory("y")])
    assert right.reward == pytest.approx(sum(weights)) and wrong.reward == 0.0


def test_answers_that_are_judged_at_once_keep_their_order_and_one_that_ends_a_process_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(score, "usable_cores", lambda: 3)
    rewards = {"right": config("math_answer"), "cut": config("length")}
    answers = ["#### 72", "#### 73", "#### $9^{9^{9^9}}$"] + ["#### 72", "#### 7"] * 48
    found = scored(rewards, [trajectory(answer) for answer in answers])
    assert [t.response_text for t in found] == answers
    assert [t.rewards[0].value for t in found] == [1.0, 0.0, 0.0] + [1.0, 0.0] * 48


def test_the_first_trajectory_that_fails_is_named(module: str) -> None:
    """Whichever rule is asked first, and however many are asked at once."""
    parts = {"right": config("math_answer"), "mine": config(f"{module}:fails")}
    with pytest.raises(PlimsollError, match=f"The reward 'mine' .{module}:fails., at row 41"):
        scored(parts, [trajectory("#### 1"), trajectory("#### 2")])
