r"""Tell whether two mathematical answers are equal, by math-verify, in processes of their own.

Why processes: a policy can write `9^{9^{9^9}}`, and sympy would compute it, in C, where neither
an exception nor math-verify's own alarm (which needs the main thread) ends it. The kernel can.
"""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from plimsoll.errors import PlimsollError
from plimsoll.machine.host import usable_cores
from plimsoll.process.child import ChildEnded, Pool, Program
from plimsoll.reward.math_form import BOX

CPU_SECONDS = 1.0
"""Processor time for one comparison."""
_WHAT = "The process that checks mathematical answers"
_CLOCK_SECONDS = 300.0
_MEMORY_GIB = 4.0
_MOST_PROCESSES = 8  # each holds some 100 MB

# What an answer can do to the process: run out of time, of stack, of memory.
_ENDED_BY_ANSWER = {-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT}


class MathVerdict(StrEnum):
    """The result of a comparison. UNDECIDED: it took too much time or memory."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NO_REFERENCE = "no reference"
    UNDECIDED = "undecided"


def verify(reference: str, answer: str) -> MathVerdict:
    """Compare two answers by value. Any thread may ask; as many at once as there are cores.

    Raises PlimsollError if a process cannot be started, or was ended by someone else.
    """
    try:
        return MathVerdict(_pool().ask([reference, answer], _CLOCK_SECONDS))
    except ChildEnded as ended:
        if ended.code in _ENDED_BY_ANSWER:
            return MathVerdict.UNDECIDED
        raise PlimsollError(f"{_WHAT} {ended}\n{ended.lines}".rstrip()) from ended
    except TimeoutError as error:
        why = f"One takes {CPU_SECONDS:g} s of the processor at most: is this machine overloaded?"
        raise PlimsollError(f"{_WHAT} gave none in {_CLOCK_SECONDS:g} s. {why}") from error


@functools.cache
def _pool() -> Pool:
    program = Program(
        open_comparison,
        what=_WHAT,
        setup=None,
        memory_gib=_MEMORY_GIB,
        cpu_seconds=CPU_SECONDS,
        forwards=False,  # what a parser prints about a response is of no interest to the run
    )
    return Pool(program, min(usable_cores(), _MOST_PROCESSES))


def open_comparison(setup: None) -> Callable[[Sequence[str]], MathVerdict]:
    """Return what answers in the process: a reference and an answer to the verdict."""
    from math_verify import LatexExtractionConfig, parse, verify  # sympy takes a second

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing timeout

    def read(text: str) -> list[Any]:
        """Return expressions, and their text, which is all if math-verify understands nothing.

        Of a box that it does not understand, math-verify would take the last number.
        """
        boxed = {"extraction_config": [LatexExtractionConfig()]} if text.startswith(BOX) else {}
        # No timeout: math-verify's would take the place of ours, and cannot interrupt C code.
        return list(parse(text, parsing_timeout=None, **boxed))

    @functools.lru_cache(maxsize=4096)
    def read_reference(text: str) -> list[Any]:
        """Return what a reference is; nothing if no part of it was understood."""
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
