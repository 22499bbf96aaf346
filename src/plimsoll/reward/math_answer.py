r"""Reward for a correct answer to a mathematical problem, checked with Hugging Face's math-verify.

Numbers are compared by value: `1,234`, `$1234.00` and `1234 apples` are equal, and so are `3/4`
and `0.75`. LaTeX (`\boxed{...}`, `$\frac{3}{4}$`) is understood. An answer or a reference that is
marked may be LaTeX without delimiters. answers.py says which part of a response is the answer.
"""

from __future__ import annotations

from plimsoll.config.base import PositiveInt
from plimsoll.errors import DataError
from plimsoll.records import Trajectory
from plimsoll.reward.answers import ANSWER_TAG, MARKER, final_answer, plain_number, reference_answer
from plimsoll.reward.math_verifier import CPU_SECONDS, MathVerdict, verify
from plimsoll.reward.references import asks_processes, checks_references, gives_answers

answer = final_answer
"""Takes a response's text; returns the answer in it, for the reward and for votes."""


def check(reference: str, *, tag: str = ANSWER_TAG) -> None:
    """Raise ValueError if a reference holds no mathematical answer that math-verify understands."""
    right = reference_answer(reference, tag=tag) or ""
    if plain_number(right):  # most are, and need no process to read them
        return
    verdict = verify(right, "")
    if verdict is MathVerdict.UNDECIDED:
        raise ValueError(f"{_cut(reference)} is not read within {CPU_SECONDS:g} s: give its value")
    if verdict is MathVerdict.NO_REFERENCE:
        raise ValueError(_unclear(reference))


def same(first: str, second: str) -> bool:
    """Return whether two answers have the same text, or math-verify finds them equal.

    Each answer is tried as the reference for the other.
    """
    pairs = ((first, second), (second, first))
    return first == second or any(verify(*pair) is MathVerdict.EQUAL for pair in pairs)


@asks_processes(61 * 2**20, "measured: math-verify 0.9 and sympy, 63.8 MB resident")
@gives_answers(answer, same)
@checks_references(check)
def reward(
    trajectory: Trajectory,
    *,
    answer_line: bool = False,
    tag: str = ANSWER_TAG,
    max_characters: PositiveInt = 1000,
) -> float:
    """Return 1 if the response's final answer equals the reference's by value, else 0.

    `final_answer` describes the options. An answer that cannot be checked within
    `math_verifier.CPU_SECONDS`, such as a tower of powers, gets 0. Raises DataError if there is no
    reference, or if it holds no answer that math-verify understands.
    """
    reference = trajectory.prompt.reference
    if reference is None:
        raise DataError("the prompt has no reference answer. Set data.train.reference.")
    given = answer(
        trajectory.response_text, answer_line=answer_line, tag=tag, max_characters=max_characters
    )
    verdict = verify(reference_answer(reference, tag=tag) or "", given or "")
    if verdict is MathVerdict.NO_REFERENCE:
        raise DataError(f"the reference {_unclear(reference)}.")
    return float(verdict is MathVerdict.EQUAL)


def _unclear(reference: str) -> str:
    return (
        f"{_cut(reference)} is no clear mathematical answer: give a number, or LaTeX (words as "
        f"\\text{{...}}, \\sqrt{{2}} for sqrt(2)); of a longer text only what is after "
        f"`{MARKER}`, in \\boxed{{...}} or in $...$ counts"
    )


def _cut(reference: str) -> str:
    return repr(reference if len(reference) <= 200 else f"{reference[:200]}...")
