r"""Compare two mathematical answers with math-verify, in separate processes.

Why processes: a policy can write `9^{9^{9^9}}`. sympy would compute it in C code, which neither an
exception nor math-verify's own alarm (it needs the main thread) can stop. The kernel can stop it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from plimsoll.errors import PlimsollError
from plimsoll.process.child import ENDED_BY_LIMIT, HELPER_SECONDS, ChildEnded, helpers
from plimsoll.reward.answers import BOX

CPU_SECONDS = 1.0
"""The most processor time for one comparison."""
_WHAT = "The process that checks mathematical answers"
_MEMORY_GIB = 4.0


class MathVerdict(StrEnum):
    """The result of a comparison. UNDECIDED: it took too much time or memory."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NO_REFERENCE = "no reference"
    UNDECIDED = "undecided"


def verify(reference: str, answer: str) -> MathVerdict:
    """Return the verdict of comparing an answer with a reference by value.

    Any thread may call this; as many calls run at once as there are cores, but at most 8.

    Raises PlimsollError if a process cannot be started, ends for another reason than the answer,
    or does not reply.
    """
    pool = helpers(open_comparison, _WHAT, _MEMORY_GIB, CPU_SECONDS)
    try:
        return MathVerdict(pool.ask([reference, answer], HELPER_SECONDS))
    except ChildEnded as ended:
        if ended.code in ENDED_BY_LIMIT:
            return MathVerdict.UNDECIDED
        raise PlimsollError(f"{_WHAT} {ended}\n{ended.lines}".rstrip()) from ended
    except TimeoutError as error:
        why = f"One takes {CPU_SECONDS:g} s of the processor at most: is this machine overloaded?"
        raise PlimsollError(f"{_WHAT} gave none in {HELPER_SECONDS:g} s. {why}") from error


def open_comparison(setup: None) -> Callable[[Sequence[str]], MathVerdict]:
    """Return the function that runs in the child: it takes (reference, answer), gives a verdict."""
    from math_verify import LatexExtractionConfig, parse, verify  # sympy takes a second

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing timeout

    def read(text: str) -> list[Any]:
        """Return the expressions in a text and their text; only text if none is understood.

        Text with a box is read as LaTeX only. Otherwise math-verify would take the last number of
        a box that it does not understand.
        """
        boxed = {"extraction_config": [LatexExtractionConfig()]} if text.startswith(BOX) else {}
        # No timeout: math-verify's would take the place of ours, and cannot interrupt C code.
        return list(parse(text, parsing_timeout=None, **boxed))

    @functools.lru_cache(maxsize=4096)
    def read_reference(text: str) -> list[Any]:
        """Return what `read` returns for a reference; an empty list if no part is understood."""
        expressions = read(text)
        return [] if all(isinstance(part, str) for part in expressions) else expressions

    def compare(pair: Sequence[str]) -> MathVerdict:
        reference, answer = pair
        gold = read_reference(reference)
        if not gold:
            return MathVerdict.NO_REFERENCE
        equal = verify(gold, read(answer), timeout_seconds=None)
        return MathVerdict.EQUAL if equal else MathVerdict.DIFFERENT

    compare(("1", "$\\frac{1}{2}$"))  # the first call compiles its patterns
    return compare
