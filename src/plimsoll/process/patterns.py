"""Match regular expressions of users and of downloaded files, with a limit of time and memory.

An expression such as `(a+)+$` takes a time that doubles with each further letter. Python's `re`
holds the interpreter's lock meanwhile, so no thread could end it. The kernel ends a process.
"""

from __future__ import annotations

from plimsoll.errors import PlimsollError
from plimsoll.process.child import ENDED_BY_LIMIT, HELPER_SECONDS, ChildEnded, helpers
from plimsoll.process.pattern_runner import open_patterns

CPU_SECONDS = 1.0
"""The most processor time for one match."""
PROCESS_BYTES = 12 * 2**20
"""Resident memory of one process, measured: Linux, Python 3.11, 11.6 MB."""
_WHAT = "The process that matches patterns"
_MEMORY_GIB = 1.0


class PatternTooSlow(PlimsollError):
    """A regular expression that needs too much time or memory for a text."""


def is_match(pattern: str, text: str, *, full: bool = False) -> bool:
    """Return whether an expression is found in a text, or with `full` matches all of the text.

    Raises:
        PatternTooSlow: The match takes more than `CPU_SECONDS`.
    """
    return bool(_ask("full" if full else "search", pattern, text))


def last_group(pattern: str, text: str) -> str | None:
    """Return the first group of the last match in a text, or None if nothing matches.

    Raises:
        PatternTooSlow: The match takes more than `CPU_SECONDS`.
    """
    group = _ask("last group", pattern, text)
    assert not isinstance(group, bool)
    return group


def _ask(question: str, pattern: str, text: str) -> str | bool | None:
    pool = helpers(open_patterns, _WHAT, _MEMORY_GIB, CPU_SECONDS)
    try:
        answer: str | bool | None = pool.ask([question, pattern, text], HELPER_SECONDS)
        return answer
    except (ChildEnded, TimeoutError) as error:
        if isinstance(error, ChildEnded) and error.code not in ENDED_BY_LIMIT:
            raise PlimsollError(f"{_WHAT} {error}") from error
        raise PatternTooSlow(
            f"the regular expression {pattern[:200]!r} takes more than {CPU_SECONDS:g} s of the "
            f"processor for a text of {len(text):,} characters. Avoid repetitions within "
            f"repetitions, such as (a+)+"
        ) from error
