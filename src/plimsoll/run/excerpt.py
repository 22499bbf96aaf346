"""Texts that models wrote, made fit to be shown on a terminal."""

from __future__ import annotations

import unicodedata

_GAP = " ... "
_SHOWN_AS_CODES = {"Cc", "Cf", "Cs"}
"""Unicode's categories of control codes, marks that turn the direction of writing, and halves of
characters."""


def visible(text: str) -> str:
    """The text with its control codes escaped, such as `\\x1b`, but for tabs and ends of lines:
    shown as they are, they would be commands to the terminal."""
    return "".join(one if one in "\t\n" or _is_shown(one) else _code(one) for one in text)


def _is_shown(character: str) -> bool:
    return unicodedata.category(character) not in _SHOWN_AS_CODES


def _code(character: str) -> str:
    return character.encode("unicode_escape").decode()


def excerpt(text: str, length: int) -> str:
    """On one line, at most so many characters: of a longer text its beginning and its end, which is
    where an answer stands."""
    line = visible(" ".join(text.split()))
    if len(line) <= length:
        return line
    if length <= 2 * len(_GAP):
        return line[:length]
    end = (length - len(_GAP)) // 2
    return line[: length - len(_GAP) - end] + _GAP + line[-end:]
