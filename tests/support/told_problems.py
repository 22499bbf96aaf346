"""The problems of settings that a command or an error tells, read from the text."""

from __future__ import annotations

import re

from plimsoll.config.problems import Problem

_HEAD = re.compile(r"^(?:error: )?(\d+) problems? in the settings$", re.MULTILINE)
_PROBLEM = re.compile(
    r"^  (?P<key>[^\s:]+)(?:: (?P<what>.*?))?(?:   \((?P<where>.*)\))?\n"
    r"      (?:\[(?P<code>[a-z0-9-]+)\] )?(?P<why>(?:(?!\n      -> )[\s\S])*)\n"
    r"      -> (?P<fix>.*)$",
    re.MULTILINE,
)


def read_problems(told: object) -> list[Problem]:
    """Return the problems that an error, or what a command wrote, lists.

    As many as its first line counts.
    """
    text = str(told)
    head = _HEAD.search(text)
    assert head is not None, text
    groups = [found.groupdict(default="") for found in _PROBLEM.finditer(text, head.end())]
    assert len(groups) == int(head[1]), text
    return [Problem(g.pop("code") or None, "error", **g) for g in groups]  # type: ignore[arg-type]
