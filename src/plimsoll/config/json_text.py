"""Read JSON text that others wrote: files, rows, answers of servers."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text.

    Raises:
        ValueError: The text is not JSON, not UTF-8, or nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply to be read") from error
