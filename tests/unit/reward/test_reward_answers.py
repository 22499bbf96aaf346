"""The answer that a rule takes from a response, as votes for the most frequent one are counted."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from examples import percent
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plimsoll.config.reward import RewardConfig
from plimsoll.records import Prompt, single_turn
from plimsoll.reward import exact_match, math_answer
from plimsoll.reward.answers import plain_number
from plimsoll.reward.math_answer import answer, check, same
from plimsoll.reward.references import voting_of


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("so #### 1\nor #### $1,234.00 \nnot 5", "1234"),
        ("#### 1234 apples", "1234"),
        ("#### -$5", "-5"),
        ("#### .50", "0.5"),
        ("#### 100.", "100"),
        ("#### 3/4", r"\boxed{3/4}"),
        (r"#### $\frac{1}{2}$", r"$\frac{1}{2}$"),
        (r"#### \boxed{ 7.0 }", "7"),
        (r"\boxed{1}, no: \boxed{\frac{1} {2}}.", r"\boxed{\frac{1} {2}}"),
        (r"\boxed{1} #### 2", "2"),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\boxed{\left( 3, \frac{\pi}{2} \right)}"),
        ("<answer> No solution </answer>", "No solution"),
        ("<answer>1</answer> or <answer>2", "1"),  # a tag that is not closed marks nothing
        ("<answer>it is 41</answer> of 42", "41"),
        (r"#### Step 2 \n so \boxed{3}", "3"),
        (r"it is 41 or \boxed{42", "42"),  # a box that does not end is none
        ("it is 1,200 or, 7, of 9.", "9"),
        ("none", None),
        ("####  ", None),
        ("", None),
    ],
)
def test_answers_of_mathematics(response: str, expected: str | None) -> None:
    assert answer(response) == expected


def test_only_what_counts_for_the_reward_has_a_vote() -> None:
    assert answer("it is 42", answer_line=True) is None
    assert answer("#### 42", answer_line=True) == "42"
    assert answer("so 17 it is. " + "." * 50, max_characters=20) is None
    assert answer("<answer>5</answer>", tag="result") == "5"  # the last number
    assert answer("<result>5</result><answer>6</answer>", tag="result") == "5"
    assert answer("<answer>5</answer> or 6", tag="") == "6"
    assert answer("<answer>5</answer>", answer_line=True) is None
    assert answer("#### 1\n<answer>#### 5</answer>", answer_line=True) == "5"


@given(st.integers(0, 10**9), st.integers(0, 3))
def test_a_number_is_one_answer_however_it_is_written(number: int, zeros: int) -> None:
    decimals = f".{'0' * zeros}" if zeros else ""
    written = (f"{number}{decimals}", f"{number:,}", f"${number:,}{decimals}", f" {number} apples.")
    assert {plain_number(text) for text in written} == {str(number)}


@given(st.text(max_size=40))
def test_any_text_may_be_a_response(text: str) -> None:
    assert answer(text) != "" and answer(f"#### {text}") != ""


FORMS = ["{}", "#### {}", "\\boxed{{{}}}", "It is ${}$.", "<think>1</think><answer>{}</answer>"]
FORMS += [
    "\\boxed{{1}} and \\boxed{{{}}}",
    "<answer>It is \\({}\\).</answer>",
    "#### {}\n\n\\boxed{{1}}",
]
QUARTERS = st.integers(-40, 40).map(lambda n: Fraction(n, 4))


def write(value: Fraction, how: int) -> str:
    sign, size = "-" * (value < 0), abs(value)
    fraction = f"{sign}\\frac{{{size.numerator * 2}}}{{{size.denominator * 2}}}"
    plain = f"{sign}{size.numerator}/{size.denominator}"
    return (f"{float(value):g}", f"{float(value):.2f}", fraction, plain)[how]


RESPONSES = st.builds(
    lambda value, how, form: (value, form.format(write(value, how))),
    QUARTERS,
    st.integers(0, 3),
    st.sampled_from(FORMS),
)
EXPRESSIONS = [
    *("5", "x=5", "x = 5", "50\\%", "0.5", "\\frac12", "(1,2)", "1,2", "\\{2,1\\}", "[1,2)", "x+1"),
    *("1+x", "\\text{even}", "even", "\\sqrt{2}", "2^{1/2}", "6 - 5i", "5 apples", "1,234", "1234"),
    *("\\pi", "x<2", "2>x", "No solution", "5 and 6", "12:05", "1/3", "0.333333", "?", ""),
]


def reward(reference: str, response: str) -> float:
    tokens, logprobs = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32)
    prompt = Prompt(0, tokens, "?", reference)
    return math_answer.reward(single_turn(prompt, 0, tokens, logprobs, response, "stop", 0))


def votes_alike(one: str, other: str) -> bool:
    answers = answer(one), answer(other)
    assert answers[0] is not None and answers[1] is not None
    return same(answers[0], answers[1])


@given(RESPONSES, RESPONSES, st.booleans())
def test_reward_and_vote_tell_numbers_apart_by_their_value(
    first: tuple[Fraction, str], second: tuple[Fraction, str], related: bool
) -> None:
    (value, one), (another, other) = first, second
    assert votes_alike(one, other) == votes_alike(other, one) == (value == another)
    assert reward(write(value, 2), other) == float(value == another)


def is_reference(text: str) -> bool:
    try:
        check(text)
    except ValueError:
        return False
    return True


@settings(max_examples=percent(150))
@given(*[st.sampled_from(EXPRESSIONS), st.sampled_from(FORMS)] * 2)
def test_answers_have_one_vote_if_the_reward_takes_one_for_the_other(
    expression: str, form: str, another: str, another_form: str
) -> None:
    """Each answer is the reference of the other; math-verify is not symmetric, a vote is."""
    one, other = form.format(expression), another_form.format(another)
    answers = answer(one), answer(other)
    assume(answers[0] is not None and answers[1] is not None)
    pairs = ((answers[0], other), (answers[1], one))
    matches = [bool(reward(own, text)) for own, text in pairs if own and is_reference(own)]
    assert votes_alike(one, other) == (answers[0] == answers[1] or any(matches))


def test_answers_after_a_marker() -> None:
    assert exact_match.answer("#### 1 #### two words \n") == "two words"
    assert exact_match.answer("1") is None and exact_match.answer("####") is None
    assert exact_match.answer("so: 1", marker="so:") == "1"
    assert exact_match.answer("<answer> New\nYork </answer> #### 1") == "New\nYork"
    assert exact_match.answer("<answer>so #### 1</answer>") == "1"
    assert exact_match.answer("<b>1</b>", tag="b") == "1"


def test_which_parts_of_a_reward_judge_an_answer() -> None:
    rewards = {
        "math": RewardConfig(name="math_answer", options={"answer_line": True}),
        "exact": RewardConfig(name="exact_match", options={"marker": "="}),
        "length": RewardConfig(name="length"),
    }
    found = {name: voting_of(rewards, name) for name in (*rewards, "reward_model")}
    assert found["length"] is None and found["reward_model"] is None
    math, exact = found["math"], found["exact"]
    assert math is not None and math.take("5") is None  # with the rule's own options
    assert math.same("0.5", r"\boxed{\frac12}")
    assert exact is not None and exact.take("1+1=2") == "2"
    assert not exact.same("2", "2.0")


def test_each_example_of_the_page_is_read_as_it_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    table = page.partition("### Which answer is read")[2].partition("\n\n- ")[0]
    examples = [line.split("|")[3].strip().strip("`") for line in table.split("\n") if "|" in line]
    assert len(examples[2:]) == 4
    assert [answer(example) for example in examples[2:]] == ["5"] * 4


def test_the_pages_reward_takes_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "extend.md").read_text()
    section = page.partition("### Answers that vote")[2]
    (tmp_path / "page_votes.py").write_text(section.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    found = voting_of({"right": RewardConfig(name="page_votes:multiple_choice")}, "right")
    assert found is not None
    assert (found.take("not A: C"), found.take("neither")) == ("C", None)
    assert found.same("C", "C") and not found.same("C", "D")
