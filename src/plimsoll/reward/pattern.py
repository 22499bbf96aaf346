"""Reward for a response of a certain form."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from plimsoll.records import Trajectory


def _compilable(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise PydanticCustomError(
            "regex", "It is no regular expression: {why}", {"why": str(error)}
        ) from error
    return pattern


Regex = Annotated[str, AfterValidator(_compilable)]


def reward(trajectory: Trajectory, *, pattern: Regex, full: bool = False) -> float:
    """Return 1 if the regular expression (of Python's `re`) is found in the response, else 0.

    With `full` the expression must match all of the response, stripped of outer white space.
    """
    if full:
        return float(re.fullmatch(pattern, trajectory.response_text.strip()) is not None)
    return float(re.search(pattern, trajectory.response_text) is not None)
