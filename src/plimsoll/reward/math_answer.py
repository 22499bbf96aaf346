"""Reward for a right answer to a mathematical problem, checked with Hugging Face's math-verify.

Numbers are equal by value: `1,234`, `$1234.00` and `1234 apples` are one answer, and so are
`3/4` and `0.75`. LaTeX (`\\boxed{...}`, `$\\frac{3}{4}$`) is understood.
"""

from __future__ import annotations

import re

from plimsoll.config.base import PositiveInt
from plimsoll.errors import DataError
from plimsoll.records import Trajectory
from plimsoll.reward.math_judge import Verdict, judge

MARKER = "####"  # begins the answer line of GSM8K
_SIGN = re.compile(r"^-\s*[$€£]?\s*(?=[\d.])")  # math-verify loses the sign of `-$5` and `- 5`


def reward(
    trajectory: Trajectory, *, answer_line: bool = False, max_characters: PositiveInt = 1000
) -> float:
    """1 where the response's final answer is worth the reference's, 0 otherwise.

    answer_line: only an answer after `####` counts; a response without one gets 0.
    max_characters: how much of the end of a response (or of its answer line) is read.

    An answer that cannot be checked within `math_judge.CPU_SECONDS`, such as a tower of powers,
    is wrong. Raises DataError where the reference is missing or holds no answer.
    """
    reference = trajectory.prompt.reference
    if reference is None:
        raise DataError("the prompt has no reference answer. Set data.train.reference.")
    if answer_line and MARKER not in trajectory.response_text:
        return 0.0
    answer = final_answer(trajectory.response_text)[-max_characters:]
    verdict = judge(final_answer(reference), answer)
    if verdict is Verdict.NO_REFERENCE:
        raise DataError(
            f"no mathematical answer was found in the reference {reference[:200]!r}. "
            f"Give it as a number, as LaTeX, or after `{MARKER}`."
        )
    return float(verdict is Verdict.EQUAL)


def final_answer(text: str) -> str:
    """The line after the last `####`; the whole text where there is no such mark.

    In a whole text, math-verify takes `\\boxed`, `answer is` and `answer:` first, and else the
    last number.
    """
    _, marker, answer = text.rpartition(MARKER)
    if not marker:
        return text.strip()
    return _SIGN.sub("-", answer.strip().partition("\n")[0])
