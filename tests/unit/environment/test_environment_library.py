"""The environments that Plimsoll brings."""

from __future__ import annotations

import asyncio
import re
from fractions import Fraction
from typing import Any

import pytest

from plimsoll.environment.library.calculator import Calculator, evaluate, format_number
from plimsoll.environment.library.guess_number import GuessNumber, draw_number, read_guess
from plimsoll.environment.library.self_correction import SelfCorrection, is_same, read_answer
from plimsoll.environment.protocol import Message, Reply
from plimsoll.environment.tool_environment import ToolEnvironment
from plimsoll.errors import ConfigError, DataError


def reply(text: str) -> Reply:
    return Reply(text, Message("assistant", text), (), None)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", "7"),
        ("(1+2)*3", "9"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.3333333333"),
        ("-1/3", "-0.3333333333"),
        ("2/3", "0.6666666667"),
        ("1e-20", "0"),
        ("-1e-20", "0"),
        ("2**-2", "0.25"),
        ("0**0", "1"),
        ("(-1)**1000000001", "-1"),
        ("1_000 + 1", "1001"),
        ("0.5*2", "1"),
        ("123456789 * 987654321", "121932631112635269"),
    ],
)
def test_arithmetic(expression: str, value: str) -> None:
    assert format_number(evaluate(expression)) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "is no arithmetic expression"),
        ("1 +", "is no arithmetic expression"),
        ("1,234 * 2", "is no arithmetic"),
        ("__import__('os').system('true')", "is no arithmetic"),
        ("x + 1", "is no arithmetic"),
        ("True + 1", "is no arithmetic"),
        ("1j", "is no arithmetic"),
        ("1 if 2 else 3", "is no arithmetic"),
        ("'a' * 3", "is no arithmetic"),
        ("1/0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0**-1", "division by zero"),
        ("2**0.5", "exponents must be whole"),
        ("9**9**9", "more than 100 digits"),
        ("(10**99)*(10**99)", "more than 100 digits"),
        ("1e999", "more than 100 digits"),
        ("1+" * 101 + "1", "has 203 characters"),
        ("1\x00", "is no arithmetic expression"),
    ],
)
def test_an_expression_that_is_no_arithmetic_is_reported(expression: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        evaluate(expression)


def test_nested_parentheses_and_signs_end() -> None:
    assert evaluate("-" * 199 + "1") == Fraction(-1)
    with pytest.raises(ValueError, match="no arithmetic"):
        evaluate("(" * 200)


def test_the_calculator_is_a_tool() -> None:
    environment = ToolEnvironment(Calculator())
    begun = asyncio.run(environment.reset({"prompt": "What is 12 * 7?", "reference": "84"}))
    assert begun.messages == ()
    (tool,) = begun.tools
    assert tool["function"]["name"] == "calculate"
    assert list(tool["function"]["parameters"]["properties"]) == ["expression"]


def play(game: GuessNumber, *guesses: str, row: dict[str, Any]) -> tuple[list[Any], float]:
    game.reset(row)
    steps = [game.step(reply(text)) for text in guesses]
    return steps, game.get_reward()


def test_guessing_to_the_number() -> None:
    game = GuessNumber(low=1, high=100, guesses=5)
    steps, reward = play(game, "50", "I say 75", "No, 70", "71.", row={"number": 71})
    facts = (r"higher than 50\b.* 4 ", r"lower than 75\b.* 3 ", r"higher than 70\b.* 2 ")
    for step, fact in zip(steps, facts, strict=False):
        assert re.search(fact, step.observation)
    assert [step.done for step in steps] == [False, False, False, True]
    assert reward == 1.0
    assert steps[-1].figures == {"guesses": 4.0, "found": 1.0}


def test_guesses_are_bounded_and_the_nearer_is_worth_more() -> None:
    far, near = (
        play(GuessNumber(guesses=2), "50", last, row={"number": 60}) for last in ("10", "59")
    )
    assert far[0][-1].done and near[0][-1].done
    assert 0 < far[1] < near[1] < 0.5
    assert far[1] == pytest.approx(0.5 * (1 - 50 / 99))


def test_a_reply_without_a_number_counts_and_is_worth_nothing() -> None:
    steps, reward = play(GuessNumber(guesses=1), "Hm.", row={"number": 3})
    assert steps[0].done and reward == 0.0
    steps, _ = play(GuessNumber(guesses=2), "Hm.", row={"number": 3})
    assert re.search(r"number from 1 to 100\b.* 1 guess ", steps[0].observation)


def test_a_guess_far_outside_is_worth_nothing() -> None:
    assert play(GuessNumber(guesses=1), "-900", row={"number": 3})[1] == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("first 3 then 12.", 12),
        ("-4", -4),
        ("none", None),
        ("3.5", None),
        ("9" * 40, None),
    ],
)
def test_the_guess_in_a_text(text: str, number: int | None) -> None:
    assert read_guess(text) == number


def test_the_rules_where_the_row_has_no_prompt() -> None:
    game = GuessNumber(low=5, high=9, guesses=3)
    (message,) = game.reset({})
    assert "from 5 to 9" in message.content and "3 guesses" in message.content
    assert game.reset({"prompt": "", "messages": [{"role": "user", "content": ""}]}) == [message]
    assert game.reset({"prompt": "Guess!"}) == []


def test_all_episodes_of_a_row_have_one_number() -> None:
    numbers = [draw_number({"prompt": f"Game {i}"}, 1, 10) for i in range(200)]
    assert numbers == [draw_number({"prompt": f"Game {i}"}, 1, 10) for i in range(200)]
    assert set(numbers) == set(range(1, 11))


def test_a_number_outside_of_the_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match="number is 101"):
        GuessNumber().reset({"number": 101})
    with pytest.raises(ConfigError, match="low < high"):
        GuessNumber(low=3, high=3)


def corrected(*texts: str, reference: str = "42") -> tuple[SelfCorrection, list[Any]]:
    environment = SelfCorrection()
    assert environment.reset({"prompt": "?", "reference": reference}) == []
    return environment, [environment.step(reply(text)) for text in texts]


def test_a_wrong_answer_is_reported_without_the_solution() -> None:
    environment, (first, second) = corrected("#### 41", "Right: #### 42")
    assert first.observation.startswith("Your answer is wrong.")
    assert "42" not in first.observation and not first.done
    assert second.done and environment.get_reward() == 1.0
    assert second.figures == {
        "first_right": 0.0,
        "second_right": 1.0,
        "corrected": 1.0,
        "spoilt": 0.0,
    }


def test_a_right_answer_may_be_spoilt() -> None:
    environment, (first, second) = corrected("#### 42", "#### 7")
    assert first.observation.startswith("Your answer is right.")
    assert environment.get_reward() == 0.0
    assert second.figures["spoilt"] == 1.0


def test_an_episode_of_one_turn_is_worth_nothing() -> None:
    environment, (first,) = corrected("no marker")
    assert first.observation.startswith("There is no answer after ####.")
    assert environment.get_reward() == 0.0


@pytest.mark.parametrize(
    ("given", "reference", "equal"),
    [
        ("42", "42", True),
        ("42.", "42", True),
        ("42.0", "42", True),
        ("1,234", "1234", True),
        ("$5", "5", True),
        ("Paris", "Paris", True),
        ("paris", "Paris", False),
        ("nan", "nan", True),
        ("420", "42", False),
        ("", "42", False),
        (None, "42", False),
    ],
)
def test_equal_answers(given: str | None, reference: str, equal: bool) -> None:
    assert is_same(given, reference) is equal


def test_the_answer_is_the_line_after_the_last_marker() -> None:
    assert read_answer("#### 1\nso\n#### 2\nDone.", "####") == "2"
    assert read_answer("2", "####") is None
    assert read_answer("####", "####") == ""


def test_a_reference_with_its_working() -> None:
    environment = SelfCorrection()
    environment.reset({"answer": "6 * 7 = 42\n#### 42"})
    environment.step(reply("#### 1"))
    environment.step(reply("#### 42"))
    assert environment.get_reward() == 1.0


def test_a_row_without_a_solution_is_refused() -> None:
    with pytest.raises(DataError, match=r"self_correction needs a solution.*prompt"):
        SelfCorrection().reset({"prompt": "?"})
