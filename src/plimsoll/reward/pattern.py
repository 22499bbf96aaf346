"""Reward for a response of a certain form."""

from __future__ import annotations

import re

from plimsoll.errors import ConfigError
from plimsoll.records import Trajectory


def reward(trajectory: Trajectory, *, pattern: str, full: bool = False) -> float:
    """1 where the regular expression (of Python's `re`) is found in the response, 0 otherwise.

    full: the whole response must match, without white space around it.

    Raises ConfigError where the pattern is no regular expression.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"the pattern {pattern!r} is no regular expression: {error}.") from error
    if full:
        return float(compiled.fullmatch(trajectory.response_text.strip()) is not None)
    return float(compiled.search(trajectory.response_text) is not None)
