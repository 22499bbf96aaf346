"""The process that matches regular expressions; patterns.py sends expressions and texts.

This module imports only the standard library, so that the process is small.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence


def open_patterns(setup: None) -> Callable[[Sequence[str]], str | bool | None]:
    """Return the function that answers (question, expression, text); see patterns.py."""

    def answer(message: Sequence[str]) -> str | bool | None:
        question, pattern, text = message
        if question == "last group":
            matches = [match[1] for match in re.finditer(pattern, text)]
            return matches[-1] if matches else None
        find = re.fullmatch if question == "full" else re.search
        return find(pattern, text) is not None

    return answer
