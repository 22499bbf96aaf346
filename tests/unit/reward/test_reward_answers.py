"""The answer that a rule takes from a response, as votes for the most frequent one are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.config.reward import RewardConfig
from plimsoll.reward import exact_match
from plimsoll.reward.math_answer import answer
from plimsoll.reward.math_form import plain_form
from plimsoll.reward.references import answers_of


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("so #### 1\nor #### $1,234.00 \nnot 5", "1234"),
        ("#### 1234 apples", "1234"),
        ("#### -$5", "-5"),
        ("#### .50", "0.5"),
        ("#### 100.", "100"),
        ("#### 3/4", "3/4"),
        (r"#### $\frac{1}{2}$", r"\frac{1}{2}"),
        (r"#### \boxed{ 7.0 }", "7"),
        (r"\boxed{1}, no: \boxed{\frac{1} {2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} #### 2", "2"),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\left(3,\frac{\pi}{2}\right)"),
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


@given(st.integers(0, 10**9), st.integers(0, 3))
def test_a_number_is_one_answer_however_it_is_written(number: int, zeros: int) -> None:
    decimals = f".{'0' * zeros}" if zeros else ""
    written = (f"{number}{decimals}", f"{number:,}", f"${number:,}{decimals}", f" {number} apples.")
    assert {plain_form(text) for text in written} == {str(number)}


@given(st.text(max_size=40))
def test_any_text_may_be_a_response(text: str) -> None:
    assert answer(text) != "" and answer(f"#### {text}") != ""


def test_answers_after_a_marker() -> None:
    assert exact_match.answer("#### 1 #### two words \n") == "two words"
    assert exact_match.answer("1") is None and exact_match.answer("####") is None
    assert exact_match.answer("so: 1", marker="so:") == "1"


def test_which_parts_of_a_reward_judge_an_answer() -> None:
    rewards = {
        "math": RewardConfig(name="math_answer", options={"answer_line": True}),
        "exact": RewardConfig(name="exact_match", options={"marker": "="}),
        "length": RewardConfig(name="length"),
    }
    found = {name: answers_of(rewards, name) for name in (*rewards, "reward_model")}
    assert found["length"] is None and found["reward_model"] is None
    math, exact = found["math"], found["exact"]
    assert math is not None and math("5") is None  # with the rule's own options
    assert exact is not None and exact("1+1=2") == "2"


def test_the_pages_reward_takes_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "extend.md").read_text()
    section = page.partition("### Answers that vote")[2]
    (tmp_path / "page_votes.py").write_text(section.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    take = answers_of({"right": RewardConfig(name="page_votes:multiple_choice")}, "right")
    assert take is not None
    assert (take("not A: C"), take("neither")) == ("C", None)
