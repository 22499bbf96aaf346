r"""Answers as data have them, such as `\frac43` or `-$5`, in a form that math-verify reads whole.

It looks for mathematics in prose: of what is not in `$...$`, `\(...\)`, `\[...\]` or `\boxed{...}`
it takes the last number, which of `6 - 5i` is 5. A reference or an answer line is all mathematics.
"""

from __future__ import annotations

import re
from itertools import accumulate

BOX = "\\boxed{"
_DELIMITED = re.compile(r"(?<!\\)(?:\$.*[^\\]\$|\\[(\[]|\\boxed\b)", re.DOTALL)
_NUMBER = re.compile(
    r"[$€£]?(?:-?(?:[1-9]\d{0,2}(?:[ ,]\d{3})+|0|[1-9]\d*)(?:\.\d+)?|\.\d+)"
    # A unit; those of two letters math-verify knows itself.
    r"\s*[%°]?(?:\s+(?!hundred|thousand|million|billion|trillion|dozen)[A-Za-z]{3,})*\.?",
    re.ASCII,
)
_SIGN = re.compile(r"^-\s*[$€£]?\s*(?=[\d.])")  # math-verify loses the sign of `-$5` and `- 5`
_SCIENTIFIC = re.compile(r"(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)")  # as Python writes 0.00001
_DIGITS = re.compile(r"-?\d[\d ,]*(?:\.\d+)?|-?\.\d+", re.ASCII)
_ANY_NUMBER = re.compile(r"-?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:/\d+)?", re.ASCII)
_COMMAND = re.compile(r"\\[A-Za-z]+\*?(?:\s*\{[^{}]*\})*(?:\s*[_^]?\d)?")
# What would be read as products of letters, or as sums: `none`, `n/a`, `2pi`, `3 1/2`; and what is
# no LaTeX: `2**10`, `**5**`.
_UNCLEAR = re.compile(r"(?!and)[A-Za-z]{3,}|pi|[nN]/[aA]|\d\s+\d|\*\*")


def is_number(text: str) -> bool:
    """Whether it is a number, perhaps with a currency before it or a unit after it."""
    return _NUMBER.fullmatch(_SIGN.sub("-", text.strip())) is not None


def as_math(text: str) -> str | None:
    r"""An answer that math-verify reads whole: a number as it is, other mathematics in `\boxed{}`
    where it has no delimiters. None for text that is not clearly mathematics, such as words."""
    text = _SIGN.sub("-", text.strip())
    if _DELIMITED.search(text) or is_number(text):
        return text
    if power := _SCIENTIFIC.fullmatch(text):
        return rf"{BOX}{power[1]} \times 10^{{{int(power[2])}}}}}"
    if not text or _UNCLEAR.search(_COMMAND.sub("~", text)):
        return None
    return f"{BOX}{text}}}"


def plain_form(answer: str) -> str:
    r"""The same text for answers that are written almost alike: `$1,234.00` and `1234 apples` are
    1234; other mathematics is without delimiters and white space, and not reckoned out: `\frac12`
    is not 0.5."""
    text = last_answer(answer) if BOX in answer else answer
    text = _SIGN.sub("-", text.strip().removesuffix("."))
    if is_number(text):
        number = _DIGITS.search(text)
        assert number is not None, text
        whole, _, part = re.sub(r"[ ,]", "", number[0]).partition(".")
        return f"{whole or '0'}.{part}".rstrip("0").rstrip(".")
    return "".join(re.sub(r"\\[()\[\]$]|\$", "", text).split())


def last_answer(text: str) -> str:
    r"""What is in the last `\boxed{...}` that ends, or else the last number; empty where there is
    neither."""
    for begin in reversed([found.end() for found in re.finditer(re.escape(BOX), text)]):
        depths = accumulate({"{": 1, "}": -1}.get(character, 0) for character in text[begin:])
        if (end := next((i for i, depth in enumerate(depths) if depth < 0), None)) is not None:
            return text[begin : begin + end]
    numbers = _ANY_NUMBER.findall(text)
    return numbers[-1] if numbers else ""
