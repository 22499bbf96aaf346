r"""Find the mathematical answer in a text, for rewards, votes and evaluations alike.

| the response has | its answer is |
| --- | --- |
| `<answer>...</answer>` | in the last one; only its text is read further |
| `####` | the line after the last one, if that is a number or other mathematics |
| `\boxed{...}` | in the last one |
| neither | the last number, or the last formula in `$...$`, `\(...\)`, `\[...\]` |

A reference answer has the same marks; a reference without one is the answer as a whole.
"""

from __future__ import annotations

import re

from plimsoll.config.base import PositiveInt
from plimsoll.reward.marks import ANSWER_TAG, MARKER, after_last, last_within
from plimsoll.reward.math_form import as_math, last_box, last_in_prose

_QUOTES = "*_`\"'“”‘’"
_FULL_STOP = re.compile(r"(?<!\\)[.,;:]+$")


def final_answer(
    response: str,
    *,
    answer_line: bool = False,
    tag: str = ANSWER_TAG,
    max_characters: PositiveInt = 1000,
) -> str | None:
    """Return a response's answer as `math_form.as_math` writes it; None if it has none.

    Words that are marked as the answer are returned as they are.

    Args:
        response: The text that was sampled.
        answer_line: Read only the line after `####`.
        tag: The tag that marks the answer; `""` for none.
        max_characters: How much of the end of the response is read, or of the part that is marked.
    """
    inside = last_within(response, tag)
    text = response if inside is None else inside
    line = _answer_line(text)
    if answer_line:
        return None if line is None else _read_whole(line[-max_characters:])
    if line is not None and (answer := _read_clear(_tidy(line[-max_characters:]))):
        return answer
    text = text[-max_characters:]
    return _read_whole(text) if inside is not None else last_box(text) or last_in_prose(text)


def reference_answer(reference: str, *, tag: str = ANSWER_TAG) -> str | None:
    """Return a reference's answer as `math_form.as_math` writes it; None if none is clear."""
    text = last_within(reference, tag) or reference
    line = _answer_line(text)
    return _read_clear(text if line is None else line)


def _answer_line(text: str) -> str | None:
    after = after_last(text, MARKER)
    return None if after is None else after.partition("\n")[0].strip()


def _read_whole(text: str) -> str | None:
    """Read a text that is marked as the answer."""
    return _read_clear(_tidy(text)) or last_in_prose(text) or text.strip() or None


def _read_clear(text: str) -> str | None:
    """Read a text that holds a box, or is mathematics as a whole; None for any other."""
    return last_box(text) or as_math(text)


def _tidy(text: str) -> str:
    """Drop a full stop at the end, and quotes, backticks, asterisks and underscores around."""
    text = _FULL_STOP.sub("", text.strip())
    quoted = text[:1] in _QUOTES and text[-1:] in _QUOTES
    return text.strip(_QUOTES).strip() if quoted else text
