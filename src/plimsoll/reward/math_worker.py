"""The process that compares mathematical answers with math-verify; started by math_verifier.py.

Its loop consumes JSON lines `[reference, answer]` on standard input, waits for nothing else, is
unblocked by each line, and produces one verdict per line on standard output. It ends when its
input is closed, so also when its parent dies. The kernel ends it where a comparison takes more
than CPU_SECONDS.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import resource
import signal
import sys
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from plimsoll.reward.math_form import BOX
from plimsoll.reward.math_verifier import CPU_SECONDS, READY, Verdict

_MEMORY_BYTES = 4 * 1024**3


def compare(reference: str, answer: str) -> Verdict:
    """Compare two answers by value, for as long as it takes."""
    gold = _gold(reference)
    if not gold:
        return Verdict.NO_REFERENCE
    equal = verify(gold, _read(answer), timeout_seconds=None)
    return Verdict.EQUAL if equal else Verdict.DIFFERENT


@functools.lru_cache(maxsize=4096)
def _gold(reference: str) -> list[Any]:
    """What a reference is; nothing where no part of it was understood."""
    found = _read(reference)
    return [] if all(isinstance(one, str) for one in found) else found


def _read(text: str) -> list[Any]:
    """Expressions, and their text, which is all there is of what math-verify does not understand.

    Of a box that it does not understand, it would take the last number.
    """
    boxed = {"extraction_config": [LatexExtractionConfig()]} if text.startswith(BOX) else {}
    # Without a timeout: math-verify's would take the place of ours, and cannot interrupt C code.
    return list(parse(text, parsing_timeout=None, **boxed))


def main() -> None:
    """Answer questions until standard input is closed."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing timeout
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which is: the kernel ends the process
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compare("1", "$\\frac{1}{2}$")  # the first call compiles its patterns
    replies = sys.stdout
    # What a parser prints about a response that it cannot read is of no interest to the run.
    with open(os.devnull, "w") as nowhere:
        print(READY, file=replies, flush=True)
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            for line in sys.stdin:
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
                verdict = compare(*json.loads(line))
                signal.setitimer(signal.ITIMER_PROF, 0)
                print(verdict, file=replies, flush=True)


if __name__ == "__main__":
    main()
