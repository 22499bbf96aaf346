"""Answers and references in every form that data have them in, judged by value."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from examples import percent
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plimsoll.records import Prompt, single_turn
from plimsoll.reward import answers, math_answer
from plimsoll.reward.math_verifier import MathVerdict, verify

PROJECT = Path(__file__).parents[3]
DATA = Path(os.environ.get("PLIMSOLL_DATA", PROJECT.parent / "shared" / "data"))


def reward(reference: str, response: str) -> float:
    tokens = np.zeros(1, dtype=np.int64)
    prompt = Prompt(0, tokens, "?", reference)
    logprobs = np.zeros(1, dtype=np.float32)
    return math_answer.reward(single_turn(prompt, 0, tokens, logprobs, response, "stop", 0))


def boxed(answer: str) -> str:
    return f"The answer is \\boxed{{{answer}}}"


@pytest.fixture(scope="module")
def math500() -> list[str]:
    """The references of MATH-500, as they are in its rows: without delimiters."""
    path = DATA / "math500" / "math500.json"
    if not path.exists():
        pytest.skip(f"MATH-500 is not at {path}: set PLIMSOLL_DATA to a folder with math500/")
    answers = [row["final_answer"] for row in json.loads(path.read_text(encoding="utf-8"))]
    assert len(answers) == 500
    return answers


def test_every_reference_of_math500_is_one(math500: list[str]) -> None:
    for reference in math500:
        math_answer.check(reference)


def test_every_answer_of_math500_is_right_by_its_own_reference(math500: list[str]) -> None:
    assert [r for r in math500 if reward(r, boxed(r)) != 1.0] == []
    assert [r for r in math500 if reward(r, f"so\n#### {r}") != 1.0] == []
    assert [r for r in math500 if reward(r, f"So it is ${r}$.") != 1.0] == []
    assert [r for r in math500 if reward(r, f"<think>2</think><answer>{r}</answer>") != 1.0] == []
    twice = "First \\boxed{{-17.25}}, but no: \\boxed{{{}}}"
    assert [r for r in math500 if reward(r, twice.format(r)) != 1.0] == []


@pytest.mark.parametrize("shift", [1, 77])
def test_every_answer_of_math500_is_wrong_by_another_ones_reference(
    math500: list[str], shift: int
) -> None:
    """Shifted further until the text is another one; of `5` and `x=5` the value is the same."""
    others = [
        next(a for a in math500[(i + shift) % 500 :] + math500 if a != reference)
        for i, reference in enumerate(math500)
    ]
    pairs = [pair for pair in zip(math500, others, strict=True) if pair != ("5", "x=5")]
    assert [pair for pair in pairs if reward(pair[0], boxed(pair[1])) != 0.0] == []


@pytest.mark.parametrize(
    ("reference", "answers"),
    [
        ("6 - 5i", ["6-5i", "-5i + 6"]),
        ("2i", ["2i"]),
        ("288 \\pi", ["288\\pi", "288π"]),
        ("\\sqrt{51}", ["\\sqrt{51}", "51^{1/2}"]),
        ("\\frac43", ["4/3", "\\frac{4}{3}", "\\dfrac 43"]),
        ("\\frac 3 4", ["0.75"]),
        ("3\\frac{1}{2}", ["7/2"]),
        ("1/2", ["\\frac12", "0.5"]),
        ("-7", ["-7", "-7.0"]),
        ("−7", ["-7"]),
        ("+7", ["7"]),
        (".5", ["\\frac12"]),
        ("-.5", ["-\\frac12"]),
        ("$-5", ["-5"]),
        ("5.", ["5"]),
        ("(2,4)", ["(2, 4)", "\\left( 2, 4 \\right)"]),
        ("(4,2)", ["(4,2)"]),
        ("(6,31,-1)", ["(6, 31, -1)"]),
        ("2,4", ["4,2", "\\{2,4\\}"]),
        ("1,-2", ["-2,1"]),
        ("\\{1,2\\}", ["\\{2,1\\}", "1,2"]),
        ("[1,2)", ["[1,2)"]),
        ("(-\\infty, 3]", ["(-\\infty,3]"]),
        ("(0,9) \\cup (9,36)", ["(9,36) \\cup (0,9)"]),
        ("x \\in [-2,7]", ["[-2,7]"]),
        (
            "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4\\end{pmatrix}",
            ["\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"],
        ),
        ("\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}", ["\\begin{pmatrix}1\\\\2\\end{pmatrix}"]),
        ("\\text{Evelyn}", ["Evelyn", "\\text{Evelyn}"]),
        ("\\text{(C)}", ["C", "(C)", "\\textbf{(C)}"]),
        ("C", ["C", "\\text{C}"]),
        ("10\\text{ cm}", ["10", "10\\text{ cm}"]),
        ("15\\mbox{ cm}^2", ["15"]),
        ("5 cm", ["5", "5\\text{ cm}"]),
        ("18 dollars", ["18", "\\$18"]),
        ("\\$18.90", ["18.9"]),
        ("90^\\circ", ["90", "90^{\\circ}"]),
        ("90°", ["90"]),
        ("50%", ["50\\%", "0.5", "50"]),
        ("50\\%", ["50\\%", "0.5", "50"]),
        ("10,\\!080", ["10080", "10,080"]),
        ("1,234.50", ["1234.5"]),
        ("1 234", ["1234"]),
        ("1e-05", ["0.00001", "10^{-5}"]),
        ("1e+22", ["10^{22}"]),
        ("x = 5", ["5", "x=5"]),
        ("y=2x+3", ["y = 3 + 2x"]),
        ("\\log_2 3", ["\\log_2 3"]),
        ("p - q", ["-q + p"]),
        ("12 and 13", ["12, 13"]),
        ("The answer is $\\frac{1}{2}$.", ["0.5"]),
        ("It is \\boxed{\\frac{1}{2}}", ["0.5"]),
        ("so much\n#### \\frac43", ["4/3"]),
        ("<think>2</think><answer>\\frac43</answer>", ["4/3"]),
        ("\\boxed{3}, no: \\boxed{\\frac43}", ["4/3"]),
    ],
)
def test_equal_in_value(reference: str, answers: list[str]) -> None:
    math_answer.check(reference)
    for answer in answers:
        assert reward(reference, boxed(answer)) == 1.0, answer
        assert reward(reference, f"so\n#### ${answer}$") == 1.0, answer


@pytest.mark.parametrize(
    ("reference", "answers"),
    [
        ("6 - 5i", ["5", "6", "6+5i", "5i"]),
        ("288 \\pi", ["288", "\\pi"]),
        ("\\sqrt{51}", ["51"]),
        ("\\frac43", ["43", "4", "3", "3/4"]),
        ("3\\frac{1}{2}", ["3", "3/2", "2"]),
        ("(2,4)", ["4", "2", "(4,2)", "[2,4]"]),
        ("2,4", ["2", "4", "2.4", "24"]),
        ("[1,2)", ["(1,2)", "[1,2]", "2"]),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", ["2", "\\begin{pmatrix}2\\\\1\\end{pmatrix}"]),
        ("\\text{even}", ["\\text{neve}", "\\text{odd}", "neve"]),
        ("50\\%", ["5", "0.05"]),
        ("1e-05", ["1", "5"]),
        ("2^{10}", ["2", "10", "20"]),
        ("x^2+1", ["1", "2"]),
        ("5x", ["5"]),
        ("18 dollars", ["1", "8"]),
    ],
)
def test_other_values(reference: str, answers: list[str]) -> None:
    for answer in answers:
        assert reward(reference, boxed(answer)) == 0.0, answer
        assert reward(reference, f"so\n#### {answer}") == 0.0, answer


@pytest.mark.parametrize(
    ("reference", "line"),
    [("51", "\\sqrt{51}"), ("5", "6 - 5i"), ("5", "√2 - 5"), ("4", "(2, 4)"), ("43", "\\frac43")],
)
def test_no_number_is_picked_from_a_bare_answer_line(reference: str, line: str) -> None:
    assert reward(reference, f"so\n#### {line}") == 0.0


@pytest.mark.parametrize(
    "line", ["**72**", "72 (dollars)", "she has 72", "$72 a day", "72 apples."]
)
def test_an_answer_line_that_is_no_mathematics_is_read_as_text(line: str) -> None:
    assert reward("72", f"so\n#### {line}") == 1.0


AROUND = [
    *("{}", "It is {}.", "{}!", "{}:", "{}, I think", "**{}**", "**Answer: {}**", "x={}", "x = {}"),
    *("`{}`", "_{}_", '"{}"', "'{}'", "“{}”", "[{}]", "({})", "|{}|", "<b>{}</b>", "The {}th"),
    *("{} apples", "${}$", "$x = {}$", "\\({}\\)", "\\[{}\\]", "$$\n{}\n$$", "7 - 5 = {}"),
    *("\\boxed{{{}}}", "$\\boxed{{{}}}$", "\\boxed{{17}} no, \\boxed{{{}}}", "\\boxed{{x = {}}}"),
    *("\\boxed{{17}}\n\nWait.\n\n\\boxed{{{}}}", "\\boxed{{{}}} is the answer to \\boxed{{}}"),
    *("#### {}", "#### **{}**", "#### {} apples.", "\\boxed{{17}}\n#### {}", "####{}\nso 17"),
    *("#### Step 3\nIt is \\boxed{{{}}}", "#### 17\n#### The answer\n{}"),
    *(
        "<answer>{}</answer>",
        "<think>17</think>\n<answer>\n{}\n</answer>",
        "<answer>{}</answer> 17",
    ),
    *("<answer>{} apples</answer>", "<answer>x = {}</answer>", "<answer>It is {}.</answer>"),
    *("<answer>**{}**</answer>", "<answer>`{}`.</answer>", '<answer>"{}"</answer>'),
    *("<answer>${}$</answer>", "<answer>\\boxed{{{}}}</answer>", "<answer>\n#### {}</answer>"),
    *("<answer>17</answer> no: <answer>{}</answer>", "<answer>{}</answer> #### 17 \\boxed{{17}}"),
    *("It is in <answer></answer>: {}", "\\boxed{{17}} <answer>{}</answer>"),
]


@pytest.mark.parametrize("around", AROUND)
def test_an_answer_is_read_whatever_stands_around_it(around: str) -> None:
    for number in ("0", "5", "10", "624", "1234", "1,234", "-3", "3.5", "0.25", "-0.5"):
        if "x =" in around and number == "1,234":
            continue  # x = 1 and 234
        assert reward(number, around.format(number)) == 1.0, number
        assert reward("17", around.format(number)) == 0.0, number


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("10-5", "5"),
        ("it is −3", "-3"),
        ("it is -$5.", "-5"),
        ("it is $-5", "-5"),
        ("x2 = 7 m2", "7"),
        ("50 cm^2", "50"),
        ("52_8", "52"),
        ("so 5 = x_1", "5"),
        ("4 and \\sqrt{2}", "4"),
        ("about 3 × 10^5", "300000"),
        ("1e-2", "0.01"),
        ("so \\frac{3}{4} of it", "0.75"),
        ("$5 for 3 apples, $15 in all", "15"),
        ("\\$5 or \\$6", "6"),
        ("$\\$32,\\!348$", "32348"),
        ("50% of it", "0.5"),
        ("\\boxed{42", "42"),
    ],
)
def test_the_last_number_in_prose(response: str, number: str) -> None:
    assert reward(number, response) == 1.0


@pytest.mark.parametrize(
    "reference",
    [
        *("none", "None", "n/a", "null", "nan", "unknown", "No solution", "Friday", "?", "."),
        *("She has 72 apples", "2 hours 30 minutes", "1.5 million", "3 1/2", "1\n2", "**72**"),
        *("sqrt(2)", "2pi", "2**10", "√2 - 5", "\\frac{1}{", "\\frac", "\\text{}", "\\boxed{}"),
        *("$ $", "72\n####", "#### none", "<answer>none</answer>", "\\boxed{5"),
    ],
)
def test_a_text_without_a_clear_answer_is_no_reference(reference: str) -> None:
    with pytest.raises(ValueError, match="no clear mathematical answer"):
        math_answer.check(reference)


def test_a_reference_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answer, "verify", lambda gold, answer: MathVerdict.UNDECIDED)
    with pytest.raises(ValueError, match=r"'2\^2' is not read within 1 s"):
        math_answer.check("2^2")


@settings(max_examples=percent(60))
@given(st.from_regex(answers._NUMBER, fullmatch=True))
def test_a_number_that_is_not_looked_at_is_one_that_is_read(text: str) -> None:
    """No process is asked about numbers before a run, so each must have its value in it."""
    number = answers.plain_number(text)
    assert number is not None
    found = re.search(r"-?[\d,. ]*\d", text)
    assert found
    value = re.sub("[, ]", "", found[0])
    assume(sum(map(str.isdigit, value)) <= 15)  # beyond a float's, 1.0 is not 1.00 to math-verify
    answer = "" if number.endswith("%") else boxed(value)  # 50 % is 50 and 0.5
    expected = MathVerdict.EQUAL if answer else MathVerdict.DIFFERENT
    assert verify(answers.as_math(text) or "", answer) is expected
