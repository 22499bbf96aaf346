r"""Whether two mathematical answers are equal, asked of a process of its own (math_worker.py).

Why a process: a policy can write `9^{9^{9^9}}`, and sympy would compute it, in C, where neither
an exception nor math-verify's own alarm (which needs the main thread) ends it. The kernel can.
"""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import threading
from enum import StrEnum

from plimsoll.errors import PlimsollError

CPU_SECONDS = 1.0
"""How long one comparison may take."""
READY = "ready"
"""What the process says when it has started."""

# What an answer can do to the process: run out of time, of stack, of memory.
_ENDED_BY_ANSWER = {-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT}
_turn = threading.Lock()


class Verdict(StrEnum):
    """What the comparison said. UNDECIDED: it took too much time or memory."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NO_REFERENCE = "no reference"
    UNDECIDED = "undecided"


def judge(reference: str, answer: str) -> Verdict:
    """Compare two answers by value. Any thread may ask; questions take turns.

    Raises PlimsollError where the process cannot be started, or was killed by someone else.
    """
    question = json.dumps([reference, answer]) + "\n"
    with _turn:
        process = _process()
        if reply := _ask(process, question):
            return Verdict(reply)
        _process.cache_clear()
        process.communicate()  # closes the pipes
    code = process.returncode
    if code not in _ENDED_BY_ANSWER:
        raise PlimsollError(
            f"The process that checks mathematical answers ended with code {code}. A negative "
            f"code is a signal; -9 is often the system's, when host memory runs out."
        )
    return Verdict.UNDECIDED


def _ask(process: subprocess.Popen[str], question: str) -> str:
    """The reply, or nothing where the process ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(question)
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline().strip()


@functools.cache
def _process() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "plimsoll.reward.math_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the run, whose step still needs its rewards
    )
    assert process.stdout is not None
    if process.stdout.readline().strip() != READY:
        raise PlimsollError(
            f"The process that checks mathematical answers did not start (code {process.wait()}). "
            f"Its own message is above; `pip install math-verify` in {sys.prefix} may be missing."
        )
    return process
