"""Find the answer that a response marks: within tags, or after a marker."""

from __future__ import annotations

import re

ANSWER_TAG = "answer"
"""The tag of the form that the rule `format` rewards: `<answer>5</answer>`."""
MARKER = "####"
"""Begins the answer line of GSM8K."""


def last_within(text: str, tag: str) -> str | None:
    """Return the stripped text in the last `<tag>...</tag>` that is not empty; None without one.

    A tag that is not closed does not count. If `tag` is `""`, the result is None.
    """
    if not tag:
        return None
    begin, end = re.escape(f"<{tag}>"), re.escape(f"</{tag}>")
    parts = re.findall(rf"{begin}((?:(?!{begin}|{end}).)*){end}", text, re.DOTALL)
    return next((part.strip() for part in reversed(parts) if part.strip()), None)


def after_last(text: str, marker: str) -> str | None:
    """Return the stripped text after the last marker, or None if there is no marker."""
    _, mark, after = text.rpartition(marker)
    return after.strip() if mark else None
