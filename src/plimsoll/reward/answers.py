r"""Find the answer in a text: what is marked, or the mathematical answer, written for math-verify.

| the response has | its mathematical answer is |
| --- | --- |
| `<answer>...</answer>` | in the last one; only its text is read further |
| `####` | the line after the last one, if that is a number or other mathematics |
| `\boxed{...}` | in the last one |
| none of these | the last number, or the last formula in `$...$`, `\(...\)`, `\[...\]` |

A reference has the same marks. If it has none, all of its text is the answer.

math-verify reads prose: outside of `$...$`, `\(...\)`, `\[...\]` and `\boxed{...}` it takes the
last number, which is 5 in `6 - 5i`. So math-verify is given only a plain number or LaTeX in
delimiters, and never a text in which it would have to choose.
"""

from __future__ import annotations

import re

from plimsoll.config.base import PositiveInt

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


BOX = "\\boxed{"
_VALUE = r"(?:[1-9]\d{0,2}(?:[ ,]\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_PERCENT = r"\s*(?:\\?%|[Pp]ercent(?:age)?\b|[Pp]ct\b)"
_NUMBER = re.compile(
    rf"(?:\\?[$€£])?(?P<value>-?(?:{_VALUE}))(?P<percent>{_PERCENT})?"
    # A unit; those of two letters math-verify knows itself.
    r"\s*°?(?:\s+(?!hundred|thousand|million|billion|trillion|dozen)[A-Za-z]{3,})*\.?",
    re.ASCII,
)
_SIGN = re.compile(r"^-\s*(?:\\?[$€£])?\s*(?=[\d.])")  # math-verify loses the sign of `-$5`
_SCIENTIFIC = re.compile(r"(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)")  # as Python writes 0.00001
_FORMULA = re.compile(
    # An opening dollar has no space after it. A closing dollar has no space before it and no digit
    # after it. So `$5 or $6` is no formula.
    r"(?<!\\)\$\$.+?\$\$|(?<!\\)\$(?![\s$])(?:\\.|[^$\n\\])*?(?<!\s)\$(?!\d)"
    r"|\\\(.+?\\\)|\\\[.+?\\\]",
    re.DOTALL,
)
_FRACTION = r"\d*\\[dt]?frac(?:\s*\{[^{}]*\}|\s*\d){2}"
_MINUS = r"(?:(?<![^\W_])(?<![)\]}^])-)?"  # not of a difference (10-5, x^-5)
# No digit of a name (x2), of an index (x_2), of a power (x^2), of an argument (\sqrt{2}).
_BEGIN = r"(?<![^\W_])(?<![\^√])(?<![^\W_]_)(?<![\^_\]]\{)(?<!sqrt\{)(?<!\d\.)"
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_POWER = r"(?:\s*(?:×|\\times)\s*10)?\^(?:-?\d+|\{-?\d+\})"
_END = rf"(?:[eE][+-]?\d+|/\d+(?:\.\d+)?|{_POWER})?(?:{_PERCENT})?"
_IN_PROSE = re.compile(rf"{_MINUS}(?:{_FRACTION}|(?:\\?[$€£]-?)?{_BEGIN}{_DECIMAL}{_END})")
_CURRENCY = re.compile(r"\\?[$€£]")
_DELIMITED = re.compile(r"(?<!\\)(?:\$.*[^\\]\$|\\[(\[])", re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+\*?(?:\s*\{[^{}]*\})*(?:\s*[_^]?\d)?")
# Texts that math-verify would misread as products of letters or as sums: `none`, `it is 5`, `n/a`,
# `2pi`, `3 1/2`; and texts that are not LaTeX: `2**10`, `**5**`.
_UNCLEAR = re.compile(r"(?!and)[A-Za-z]{3,}|\b(?i:it|is|so|of|to|we)\b|pi|[nN]/[aA]|\d\s+\d|\*\*")


def plain_number(text: str) -> str | None:
    """Return a number without its currency, unit and separators; None if the text is no number.

    Both `$1,234.00` and `1234 apples` give `1234`. A minus and a percent sign stay.
    """
    number = _NUMBER.fullmatch(_with_plain_signs(text))
    if number is None:
        return None
    value = re.sub(r"[ ,]", "", number["value"])
    whole, _, part = value.removeprefix("-").partition(".")
    digits = f"{whole.lstrip('0') or '0'}.{part}".rstrip("0").rstrip(".")
    return f"{'-' * value.startswith('-')}{digits}{'%' if number['percent'] else ''}"


def as_math(text: str) -> str | None:
    r"""Return an answer so that math-verify reads all of it; None if it is no clear mathematics.

    A number is returned in plain digits. Other mathematics is put into `\boxed{}`, unless it has
    delimiters.
    """
    text = _with_plain_signs(text)
    if (number := plain_number(text)) is not None:
        return number
    if not text or BOX in text:  # the box is empty, or does not end
        return None
    if _DELIMITED.search(text):
        return text
    if power := _SCIENTIFIC.fullmatch(text):
        return rf"{BOX}{power[1]} \times 10^{{{int(power[2])}}}}}"
    return None if _UNCLEAR.search(_COMMAND.sub("~", text)) else f"{BOX}{text}}}"


def _last_box(text: str) -> str | None:
    r"""Return the last closed `\boxed{...}` that is not empty, or None.

    If the box holds a number, only its digits are returned.
    """
    ends = _ends_of_braces(text)
    for begin in reversed([box.end() for box in re.finditer(re.escape(BOX), text)]):
        if begin in ends and (inside := text[begin : ends[begin]].strip()):
            return plain_number(inside) or f"{BOX}{inside}}}"
    return None


def _ends_of_braces(text: str) -> dict[int, int]:
    """Return the place of each closing brace by the place after its opening brace."""
    opened: list[int] = []
    ends: dict[int, int] = {}
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened:
            ends[opened.pop()] = brace.start()
    return ends


def _last_in_prose(text: str) -> str | None:
    """Return the last number (as `as_math` writes it) or formula in a prose text, or None.

    A formula has delimiters. A LaTeX fraction counts as a number.
    """
    text = _minus(text)
    formulas = list(_FORMULA.finditer(text))
    numbers = list(_IN_PROSE.finditer(text, formulas[-1].end() if formulas else 0))
    if numbers:
        return as_math(_CURRENCY.sub("", numbers[-1][0]))
    return formulas[-1][0] if formulas else None


def _with_plain_signs(text: str) -> str:
    return _SIGN.sub("-", _minus(text.strip()))


def _minus(text: str) -> str:
    """Return the text with each Unicode minus sign replaced by a hyphen."""
    return text.replace("\u2212", "-")


_QUOTES = "*_`\"'“”‘’"
_FULL_STOP = re.compile(r"(?<!\\)[.,;:]+$")


def final_answer(
    response: str,
    *,
    answer_line: bool = False,
    tag: str = ANSWER_TAG,
    max_characters: PositiveInt = 1000,
) -> str | None:
    """Return a response's answer as `as_math` writes it; None if it has no answer.

    If the marked answer is words, they are returned unchanged.

    Args:
        response: The text that was sampled.
        answer_line: Read only the line after the last `####`.
        tag: The tag that marks the answer; `""` for no tag.
        max_characters: Read only so many characters at the end of the response, or at the end of
            the marked part.
    """
    inside = last_within(response, tag)
    text = response if inside is None else inside
    line = _answer_line(text)
    if answer_line:
        return None if line is None else _read_whole(line[-max_characters:])
    if line is not None and (answer := _read_clear(_tidy(line[-max_characters:]))):
        return answer
    text = text[-max_characters:]
    return _read_whole(text) if inside is not None else _last_box(text) or _last_in_prose(text)


def reference_answer(reference: str, *, tag: str = ANSWER_TAG) -> str | None:
    """Return a reference's answer as `as_math` writes it; None if it is not clear."""
    text = last_within(reference, tag) or reference
    line = _answer_line(text)
    return _read_clear(text if line is None else line)


def _answer_line(text: str) -> str | None:
    after = after_last(text, MARKER)
    return None if after is None else after.partition("\n")[0].strip()


def _read_whole(text: str) -> str | None:
    """Return the answer in a text that is marked as the answer; None if the text is empty."""
    return _read_clear(_tidy(text)) or _last_in_prose(text) or text.strip() or None


def _read_clear(text: str) -> str | None:
    """Return the last box of a text, or the text itself if all of it is mathematics; else None."""
    return _last_box(text) or as_math(text)


def _tidy(text: str) -> str:
    """Return a text without its final punctuation and without the quotes or emphasis around it."""
    text = _FULL_STOP.sub("", text.strip())
    quoted = text[:1] in _QUOTES and text[-1:] in _QUOTES
    return text.strip(_QUOTES).strip() if quoted else text
