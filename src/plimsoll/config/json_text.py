"""Read JSON text that others wrote: files, rows, answers of servers."""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 100
"""The most lists and objects around a value. Code that walks a value calls itself for each."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text.

    Raises:
        ValueError: The text is not JSON, not UTF-8, or nested too deeply to be read.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply to be read") from error
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    check_depth(value, sum(map(text.count, opening)))  # type: ignore[arg-type]
    return value


def check_depth(value: object, brackets: int = DEEPEST + 1) -> None:
    """Raise ValueError if a value of JSON is nested too deeply to be worked on.

    `brackets`: The number of opening brackets in its text. Few of them save the search.
    """
    if brackets > DEEPEST and nests_more(value, DEEPEST):
        raise ValueError(f"it is nested more than {DEEPEST} deep")


def nests_more(value: object, most: int) -> bool:
    """Return whether a value has more than `most` lists and objects around one of its parts."""
    layer = [value]
    for _ in range(most + 1):
        inner: list[object] = []
        for item in layer:
            if isinstance(item, dict | list):
                inner += item.values() if isinstance(item, dict) else item
        layer = inner
    return bool(layer)
