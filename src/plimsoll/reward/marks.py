"""Find the answer that a response marks: within tags, or after a marker."""

from __future__ import annotations

import re

ANSWER_TAG = "answer"
"""The tag of the form that the rule `format` rewards: `<answer>5</answer>`."""
MARKER = "####"
"""Begins the answer line of GSM8K."""


def last_within(text: str, tag: str) -> str | None:
    """Return the text of the last `<tag>...</tag>` that is not empty, stripped, or None.

    A tag that is not closed marks nothing, nor does the tag `""`.
    """
    if not tag:
        return None
    begin, end = re.escape(f"<{tag}>"), re.escape(f"</{tag}>")
    parts = re.findall(rf"{begin}((?:(?!{begin}|{end}).)*){end}", text, re.DOTALL)
    return next((part.strip() for part in reversed(parts) if part.strip()), None)


def after_last(text: str, marker: str) -> str | None:
    """Return the text after the last marker, stripped; None if there is no marker."""
    _, mark, after = text.rpartition(marker)
    return after.strip() if mark else None
