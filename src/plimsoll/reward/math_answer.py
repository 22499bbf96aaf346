r"""Reward for a right answer to a mathematical problem, checked with Hugging Face's math-verify.

Numbers are equal by value: `1,234`, `$1234.00` and `1234 apples` are one answer, and so are
`3/4` and `0.75`. LaTeX (`\boxed{...}`, `$\frac{3}{4}$`) is understood; in a reference, and after
`####`, without delimiters too.
"""

from __future__ import annotations

from plimsoll.config.base import PositiveInt
from plimsoll.errors import DataError
from plimsoll.records import Trajectory
from plimsoll.reward.math_form import as_math, is_number, last_answer, plain_form
from plimsoll.reward.math_verifier import CPU_SECONDS, Verdict, verify
from plimsoll.reward.references import asks_processes, checks_references, gives_answers

MARKER = "####"  # begins the answer line of GSM8K


def check(reference: str) -> None:
    """Raises ValueError for a reference that holds no answer, or none that is clear."""
    answer = _answer_line(reference)
    if is_number(answer):  # most are, and need no process to read them
        return
    verdict = verify(as_math(answer) or "", "")
    if verdict is Verdict.UNDECIDED:
        raise ValueError(
            f"{_shown(reference)} is not read within {CPU_SECONDS:g} s: give its value"
        )
    if verdict is Verdict.NO_REFERENCE:
        raise ValueError(_unclear(reference))


def answer(
    response: str, *, answer_line: bool = False, max_characters: PositiveInt = 1000
) -> str | None:
    r"""The final answer, as votes are counted: plain numbers by value, other mathematics as it is
    written, without white space. It is what stands on the last answer line, in the last `\boxed`,
    or else the last number."""
    if answer_line and MARKER not in response:
        return None
    end = _answer_line(response)[-max_characters:]
    return plain_form(end if MARKER in response else last_answer(end)) or None


@asks_processes(61 * 2**20, "measured: math-verify 0.9 and sympy, 63.8 MB resident")
@gives_answers(answer)
@checks_references(check)
def reward(
    trajectory: Trajectory, *, answer_line: bool = False, max_characters: PositiveInt = 1000
) -> float:
    """1 where the response's final answer is worth the reference's, 0 otherwise.

    answer_line: only an answer after `####` counts; a response without one gets 0.
    max_characters: how much of the end of a response (or of its answer line) is read.

    An answer that cannot be checked within `math_verifier.CPU_SECONDS`, such as a tower of powers,
    is wrong. Raises DataError where the reference is missing or is none that `check` takes.
    """
    reference = trajectory.prompt.reference
    if reference is None:
        raise DataError("the prompt has no reference answer. Set data.train.reference.")
    if answer_line and MARKER not in trajectory.response_text:
        return 0.0
    answer = _final_answer(trajectory.response_text, max_characters)
    verdict = verify(as_math(_answer_line(reference)) or "", answer)
    if verdict is Verdict.NO_REFERENCE:
        raise DataError(f"the reference {_unclear(reference)}.")
    return float(verdict is Verdict.EQUAL)


def _final_answer(response: str, characters: int) -> str:
    r"""What is judged: the line after the last `####`; the whole response where there is no such
    mark, of which math-verify takes `\boxed`, `answer is` and `answer:` first, and else the last
    number."""
    end = _answer_line(response)[-characters:]
    return (as_math(end) or end) if MARKER in response else end


def _answer_line(text: str) -> str:
    """The line after the last `####`; the whole text where there is no such mark."""
    _, marker, answer = text.rpartition(MARKER)
    return answer.strip().partition("\n")[0].strip() if marker else text.strip()


def _unclear(reference: str) -> str:
    return (
        f"{_shown(reference)} is no clear mathematical answer: give a number, or LaTeX (words as "
        f"\\text{{...}}, \\sqrt{{2}} for sqrt(2)); of a longer text only what is after "
        f"`{MARKER}`, in \\boxed{{...}} or in $...$ counts"
    )


def _shown(reference: str) -> str:
    return repr(reference if len(reference) <= 200 else f"{reference[:200]}...")
