from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Timer

import numpy as np
import psutil
import pytest

from plimsoll.config.base import OptionValue
from plimsoll.config.reward import RewardConfig
from plimsoll.errors import ConfigError, DataError, PlimsollError
from plimsoll.records import FinishReason, Prompt, Trajectory, single_turn
from plimsoll.reward import exact_match, length, math_answer, math_verifier, overlong, pattern
from plimsoll.reward import format as form
from plimsoll.reward.score import build_rule

PROJECT = Path(__file__).parents[3]
DATA = Path(os.environ.get("PLIMSOLL_DATA", PROJECT.parent / "shared" / "data"))


def trajectory(
    response: str, reference: str | None = None, finish_reason: FinishReason = "stop"
) -> Trajectory:
    tokens = np.zeros(3, dtype=np.int64)
    prompt = Prompt(0, tokens, "?", reference)
    return single_turn(
        prompt, 0, tokens, np.zeros(3, dtype=np.float32), response, finish_reason, weight_version=0
    )


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        ("72", "#### 72"),
        ("She has 72.\n#### 72", "48 + 24 = 72\n#### 72\n"),
        ("1234", "#### 1,234"),
        ("#### 1,234,567", "The answer is 1234567."),
        ("18", "#### $18.00"),
        ("18", "#### 18 dollars"),
        ("18", "#### €18"),
        ("-5", "#### -$5"),
        ("-5", "#### - 5"),
        ("5", "#### 5cm"),
        ("0.5", "#### 1/2"),
        ("3/4", "#### 0.75"),
        ("3/4", "so it is \\boxed{\\frac{3}{4}}"),
        ("$\\frac{1}{2}$", "The final answer is $\\frac{2}{4}$."),
        ("10", "#### 4 \n wait, no\n#### 10"),
        ("10", "12 was the first. Answer: 10"),
        ("10", "10"),
        (".5", "#### 0.50"),
        ("$x^2+1$", "$1 + x \\cdot x$"),
    ],
)
def test_equal_answers(reference: str, response: str) -> None:
    assert math_answer.reward(trajectory(response, reference)) == 1.0


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        ("72", "#### 73"),
        ("72", "#### -72"),
        ("-72", "#### 72"),
        ("72", "72 is near, but\n#### 7.2"),
        ("72", "#### 72 73"),
        ("72", "####"),
        ("72", "#### "),
        ("72", ""),
        ("72", "no number at all"),
        ("1234", "#### 1.234"),
        ("72", "#### 72\n#### 5"),
        ("1/3", "#### 0.33"),
        ("5", "#### -$5"),
    ],
)
def test_different_answers(reference: str, response: str) -> None:
    assert math_answer.reward(trajectory(response, reference)) == 0.0


def test_only_the_answer_line_counts_where_asked() -> None:
    assert math_answer.reward(trajectory("It is 72", "72"), answer_line=True) == 0.0
    assert math_answer.reward(trajectory("It is\n#### 72", "72"), answer_line=True) == 1.0


def test_only_the_end_of_a_long_response_is_read() -> None:
    start = trajectory("\\boxed{72} " + "and " * 300, "72")
    assert math_answer.reward(start) == 0.0
    assert math_answer.reward(start, max_characters=5000) == 1.0


@pytest.mark.parametrize("reference", ["9^9^9^9", "$9^{9^{9^9}}$", "$100000000!$"])
def test_an_answer_that_would_never_be_computed_is_wrong_and_soon_over(reference: str) -> None:
    start = time.monotonic()
    assert math_answer.reward(trajectory(f"#### {reference}", "72")) == 0.0
    assert time.monotonic() - start < 30
    assert math_answer.reward(trajectory("#### 72", "72")) == 1.0  # and the next is checked


def test_answers_are_checked_in_any_thread() -> None:
    given = [trajectory(f"#### {n}", str(n // 2 * 2)) for n in range(100)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(math_answer.reward, given)) == [1.0, 0.0] * 50


def test_a_process_that_someone_else_killed_is_an_error_only_if_it_was_at_work() -> None:
    assert math_verifier.verify("1", "1") is math_verifier.MathVerdict.EQUAL
    for process in kill_verifiers():
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    assert math_verifier.verify("1", "1") is math_verifier.MathVerdict.EQUAL
    Timer(0.3, kill_verifiers).start()
    with pytest.raises(PlimsollError, match="ended by SIGKILL"):
        math_verifier.verify("$9^{9^{9^9}}$", "1")  # at work for a second
    assert math_verifier.verify("1", "1") is math_verifier.MathVerdict.EQUAL


def kill_verifiers() -> list[psutil.Process]:
    children = psutil.Process().children()
    commands = [child.as_dict(["cmdline"])["cmdline"] or () for child in children]  # no zombies
    verifiers = [
        child
        for child, words in zip(children, commands, strict=True)
        if math_verifier.__name__ in words
    ]
    for process in verifiers:
        process.kill()
    return verifiers


def test_a_reference_without_an_answer_is_refused() -> None:
    with pytest.raises(DataError, match="'none at all' is no clear"):
        math_answer.reward(trajectory("#### 1", "none at all"))
    with pytest.raises(DataError, match="no reference"):
        math_answer.reward(trajectory("#### 1"))


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_gsm8k_solution_is_right_by_its_own_reference(split: str) -> None:
    path = DATA / "gsm8k" / f"{split}.jsonl"
    if not path.exists():
        pytest.skip(f"GSM8K is not at {path}: set PLIMSOLL_DATA to a folder that holds gsm8k/")
    answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    assert len(answers) == {"train": 7473, "test": 1319}[split]
    wrong = [a for a in answers if math_answer.reward(trajectory(a, a), answer_line=True) != 1.0]
    assert wrong == []
    bare = [a.rpartition("####")[2].strip() for a in answers[:500]]
    assert all(math_answer.reward(trajectory(f"So it is {a}.", a)) == 1.0 for a in bare)
    lines = [f"#### {float(a.replace(',', '')) + 1:.0f}" for a in bare]
    wrong_rewards = [math_answer.reward(trajectory(r, a)) for r, a in zip(lines, bare, strict=True)]
    assert wrong_rewards == [0.0] * len(bare)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("a\n#### 72 \n", 1.0),
        ("#### 7\n#### 72", 1.0),
        ("####72", 1.0),
        ("#### 72.0", 0.0),
        ("#### 72 or so", 0.0),
        ("72", 0.0),
        ("", 0.0),
        ("<think>7</think><answer>72</answer>", 1.0),
        ("<answer>\n72\n</answer> or #### 7", 1.0),
        ("<answer>#### 72</answer>", 1.0),
        ("<answer>7</answer> no: <answer>72</answer>", 1.0),
        ("<answer>72 or so</answer>", 0.0),
        ("#### 72 <answer>7</answer>", 0.0),
        ("<answer>72", 0.0),
    ],
)
def test_exact_match(response: str, value: float) -> None:
    assert exact_match.reward(trajectory(response, " 72")) == value


def test_exact_match_takes_a_marker_and_needs_a_reference() -> None:
    assert exact_match.reward(trajectory("1+1=2", "2"), marker="=") == 1.0
    assert exact_match.reward(trajectory("<b>2</b>", "2"), tag="b") == 1.0
    assert exact_match.reward(trajectory("#### <answer>2</answer>", "<answer>2</answer>"), tag="")
    with pytest.raises(DataError, match="no reference"):
        exact_match.reward(trajectory("#### 72"))


def test_a_reference_with_the_marker_in_it_is_none_for_an_exact_match() -> None:
    exact_match.check("72")
    exact_match.check("#### 72", marker="=")
    with pytest.raises(ValueError, match=r"'48 \+ 24\\n#### 72' .*marker '####'"):
        exact_match.check("48 + 24\n#### 72")
    exact_match.check("<b>72</b>")
    with pytest.raises(ValueError, match=r"'<answer>72</answer>' .*<answer>\.\.\.</answer>"):
        exact_match.check("<answer>72</answer>")


def test_an_empty_answer_is_no_match_without_a_marker() -> None:
    assert exact_match.reward(trajectory("", "")) == 0.0


def test_pattern_is_found_anywhere_or_is_the_whole() -> None:
    line = r"(?m)^#### -?\d+$"
    assert pattern.reward(trajectory("so\n#### -3\n"), pattern=line) == 1.0
    assert pattern.reward(trajectory("so #### -3"), pattern=line) == 0.0
    assert pattern.reward(trajectory(" 12 \n"), pattern=r"\d+", full=True) == 1.0
    assert pattern.reward(trajectory("12 apples"), pattern=r"\d+", full=True) == 0.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "pattern",
            {"pattern": "a(b"},
            r"'a\(b'.*no regular expression: missing \).*at position 1",
        ),
        ("pattern", {"pattern": "a", "ful": True}, r"no option 'ful'.*Did you mean 'full'"),
        ("pattern", {}, r"needs the option 'pattern'"),
        ("exact_match", {"marker": ""}, r"'marker' of 'exact_match' is ''.*at least 1 character"),
        ("math_answer", {"max_characters": 0}, r"'max_characters'.*greater than or equal to 1"),
        ("length", {"value": "-1"}, r"'value' of 'length' is '-1' \(str\).*valid number"),
    ],
)
def test_options_are_refused_before_a_response_is_seen(
    name: str, options: dict[str, OptionValue], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_rule("part", RewardConfig(name=name, options=options))


def test_length_is_about_responses_that_did_not_stop() -> None:
    assert length.reward(trajectory("x", finish_reason="length"), value=-0.5) == -0.5
    assert length.reward(trajectory("x", finish_reason="length")) == -1.0
    assert length.reward(trajectory("x", finish_reason="stop"), value=-0.5) == 0.0


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>\na\n</think>\n\n<answer> b </answer>\n", 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> Done.", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<think>a</think>", 0.0),
        ("b", 0.0),
    ],
)
def test_format_wants_each_part_once_and_in_order(response: str, value: float) -> None:
    assert form.reward(trajectory(response)) == value
    other = response.replace("think", "reason")
    assert form.reward(trajectory(other), think="reason") == value


@pytest.mark.parametrize("tag", ["answer", "result"])
def test_what_the_format_rewards_is_read_as_the_answer(tag: str) -> None:
    given = trajectory(f"<think>2+3=5, not 7</think>\n<{tag}>5</{tag}>", "5")
    assert form.reward(given, answer=tag) == 1.0
    assert math_answer.reward(given, tag=tag) == exact_match.reward(given, tag=tag) == 1.0


def test_format_knows_a_template_that_opens_the_first_tag() -> None:
    rest = trajectory("a</think><answer>b</answer>")
    assert (form.reward(rest), form.reward(rest, opened=True)) == (0.0, 1.0)
    assert form.reward(trajectory("<think>a</think><answer>b</answer>"), opened=True) == 1.0
    assert form.reward(trajectory("a<answer>b</answer>"), opened=True) == 0.0


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (30, -1.0)]
)
def test_overlong_falls_linearly_within_the_buffer(tokens: int, value: float) -> None:
    """The values are those of DAPO's equation 13 with L_max = 20 and L_cache = 4."""
    given = replace(
        trajectory("x"),
        response_tokens=np.zeros(tokens, np.int64),
        loss_mask=np.ones(tokens, np.bool_),
        columns={},
    )
    assert overlong.reward(given, max_new_tokens=20, buffer=4) == value
    assert overlong.reward(given, max_new_tokens=20, buffer=4, factor=0.5) == value / 2


def branch(prompt: int, sampled: list[int]) -> Trajectory:
    """A branch that begins with so many tokens. sampled: 1 for each token that was, else 0."""
    count = len(sampled)
    return replace(
        trajectory("x"),
        prompt=Prompt(0, np.zeros(prompt, np.int64), "?"),
        response_tokens=np.zeros(count, np.int64),
        loss_mask=np.array(sampled, np.bool_),
        columns={},
    )


def test_overlong_counts_what_was_sampled_or_the_whole_episode() -> None:
    """10 tokens follow the prompt, 6 of them sampled. A second branch has 2 more sampled ones, and
    ends 12 + 5 - 3 = 14 tokens after the first prompt."""
    turns = branch(3, [1, 1, 1, 0, 0, 0, 0, 1, 1, 1])
    assert overlong.reward(turns, max_new_tokens=8, buffer=4) == -2 / 4
    assert overlong.reward(turns, max_new_tokens=12, buffer=4) == 0.0
    assert overlong.reward(turns, max_new_tokens=12, buffer=4, observations=True) == -2 / 4
    anew = replace(branch(12, [0, 0, 0, 1, 1]), earlier=(turns,))
    assert overlong.reward(anew, max_new_tokens=10, buffer=4) == -2 / 4
    assert overlong.reward(anew, max_new_tokens=16, buffer=4, observations=True) == -2 / 4
