r"""Whether two mathematical answers are equal, asked of processes of its own (math_worker.py).

Why a process: a policy can write `9^{9^{9^9}}`, and sympy would compute it, in C, where neither
an exception nor math-verify's own alarm (which needs the main thread) ends it. The kernel can.
"""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from enum import StrEnum
from queue import LifoQueue

from plimsoll.errors import PlimsollError
from plimsoll.machine.host import usable_cores
from plimsoll.machine.meter import count_as_own

CPU_SECONDS = 1.0
"""How long one comparison may take."""
READY = "ready"
"""What the process says when it has started."""

# What an answer can do to the process: run out of time, of stack, of memory.
_ENDED_BY_ANSWER = {-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT}
_MOST_PROCESSES = 8  # each holds some 100 MB


class Verdict(StrEnum):
    """What the comparison said. UNDECIDED: it took too much time or memory."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NO_REFERENCE = "no reference"
    UNDECIDED = "undecided"


def verify(reference: str, answer: str) -> Verdict:
    """Compare two answers by value. Any thread may ask; as many at once as there are cores.

    Raises PlimsollError where a process cannot be started, or was killed by someone else.
    """
    question = json.dumps([reference, answer]) + "\n"
    places = _places()
    process, kept = places.get(), None
    try:
        process = process or _started()
        if reply := _ask(process, question):
            kept = process
            return Verdict(reply)
        process.communicate()  # closes the pipes
    finally:
        places.put(kept)
    code = process.returncode
    if code not in _ENDED_BY_ANSWER:
        raise PlimsollError(
            f"The process that checks mathematical answers ended with code {code}. A negative "
            f"code is a signal; -9 is often the system's, when host memory runs out."
        )
    return Verdict.UNDECIDED


@functools.cache
def _places() -> LifoQueue[subprocess.Popen[str] | None]:
    """The processes that wait for a question, and None for each that may yet be started. The last
    that answered is the next: who asks one question after another starts no second process."""
    places: LifoQueue[subprocess.Popen[str] | None] = LifoQueue()
    for _ in range(min(usable_cores(), _MOST_PROCESSES)):
        places.put(None)
    return places


def _ask(process: subprocess.Popen[str], question: str) -> str:
    """The reply, or nothing where the process ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(question)
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline().strip()


def _started() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "plimsoll.reward.math_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the run, whose step still needs its rewards
    )
    count_as_own(process.pid)
    assert process.stdout is not None
    if process.stdout.readline().strip() != READY:
        raise PlimsollError(
            f"The process that checks mathematical answers did not start (code {process.wait()}). "
            f"Its own message is above; `pip install math-verify` in {sys.prefix} may be missing."
        )
    return process
