"""Reward for a response of a certain form."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from plimsoll.process.patterns import PROCESS_BYTES, is_match
from plimsoll.records import Trajectory
from plimsoll.reward.references import asks_processes


def _compilable(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise PydanticCustomError(
            "regex", "It is no regular expression: {why}", {"why": str(error)}
        ) from error
    return pattern


Regex = Annotated[str, AfterValidator(_compilable)]


@asks_processes(PROCESS_BYTES, "measured: Linux, Python 3.11, 11.6 MB resident")
def reward(trajectory: Trajectory, *, pattern: Regex, full: bool = False) -> float:
    """Return 1 if the regular expression (of Python's `re`) is found in the response, else 0.

    With `full` the expression must match all of the response, stripped of outer white space.
    Raises PatternTooSlow if the match takes more than a second of the processor.
    """
    text = trajectory.response_text
    return float(is_match(pattern, text.strip() if full else text, full=full))
