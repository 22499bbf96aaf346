"""The last lines of a process's log."""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST_LINE = 500
"""Characters of a line that are shown at most."""
_TAIL_BYTES = 256 * 1024


def matches_from_the_end(path: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield what the pattern's first group matches in the lines of a log's tail, last line first.

    Nothing if there is no such file, as for a process on another node.
    """
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - _TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return
    for line in reversed(lines):
        if match := pattern.match(line):
            yield match[1][:LONGEST_LINE]
