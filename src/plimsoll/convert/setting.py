"""What a setting of another trainer's is: values as its parser reads them, and what it becomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome

Rule = Callable[[Options], Iterator[Outcome]]


@dataclass(frozen=True)
class Read:
    """How words become a value. kind: of each word; of `bool` there is none. least, most: how many;
    None: any number. lowest: the smallest value. among: the only ones. off: of a switch that turns
    off."""

    kind: type
    least: int = 1
    most: int | None = 1
    lowest: int | None = None
    among: tuple[str, ...] = ()
    off: bool = False

    @property
    def one(self) -> bool:
        """Whether the value is that of a single word."""
        return self.most == 1


SWITCH = Read(bool, 0, 0)
BOOL = Read(bool, 0, 1)
OFF = Read(bool, 0, 0, off=True)
WHOLE = Read(int)
COUNT = Read(int, lowest=1)
NUMBER = Read(float)
TEXT = Read(str)
PAIR = Read(float, 2, 2)
BOUNDS = Read(float, 1, 2)
WORDS = Read(str, 0, None)


def one_of(*values: str) -> Read:
    return Read(str, among=values)


@dataclass(frozen=True)
class Key:
    """The value stands for keys of the config. paths: dotted; one of a role that there is not is
    left out. how: from the flag's value to the key's, None: nothing is written. note: how that was
    converted."""

    paths: tuple[str, ...]
    how: Callable[[Any], object] = field(default=lambda value: value)
    note: str = ""


def positive(value: float) -> float | None:
    """The value; None of 0 and less, which turn a setting off."""
    return value if value > 0 else None


@dataclass(frozen=True)
class Idle:
    """It has no effect here. why: what stands in its place."""

    why: str


@dataclass(frozen=True)
class Same:
    """It is so here, without a key. why: how."""

    why: str


@dataclass(frozen=True)
class Lacking:
    """There is nothing like it here, so that it is left out. refused: without it the run would be
    another one, and nothing is written. harmless: values that ask for nothing."""

    why: str
    refused: bool = False
    harmless: tuple[object, ...] = (None, False)


@dataclass(frozen=True)
class Part:
    """A rule reads it, with others."""

    rule: Rule


Becomes = Key | Same | Idle | Lacking | Part


_NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
"""What argparse takes for a number, not for an option."""


def is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NEGATIVE.match(word)


def read_value(read: Read, words: list[str]) -> object:
    """From the words after a flag, as many as it takes. Raises ValueError, saying what is wrong."""
    if read.kind is bool:
        return _truth(words[0]) if words else not read.off
    if len(words) < read.least:
        wanted = "a value" if read.least == 1 else f"{read.least} values"
        raise ValueError(f"It takes {wanted}, and {len(words) or 'none'} follows.")
    values = [_one(read, word) for word in words]
    return values[0] if read.one else tuple(values)


_TRUE, _FALSE = ("true", "yes", "on", "1", "y", "t"), ("false", "no", "off", "0", "n", "f")


def _truth(word: str) -> bool:
    if word.lower() not in _TRUE + _FALSE:
        raise ValueError("It must be true or false.")
    return word.lower() in _TRUE


_KINDS: Mapping[type, str] = {int: "a whole number", float: "a number"}


def _one(read: Read, word: str) -> object:
    kind = read.kind
    try:
        value = kind(word)
    except ValueError as error:
        raise ValueError(f"It must be {_KINDS[kind]}.") from error
    if kind is float and not isfinite(value):
        raise ValueError("It must be a finite number.")
    if read.lowest is not None and value < read.lowest:
        raise ValueError(f"It must be {read.lowest} or more.")
    if read.among and value not in read.among:
        raise ValueError(f"It must be one of {', '.join(read.among)}.")
    return value


@dataclass(frozen=True)
class Setting:
    """A setting of a trainer of which one version is read.

    of: the commands that have it. read: how its words become a value. default: the trainer's own,
    by command. older: names that it had. secret: its value is never shown. empty: it may be null,
    though it is not by default.
    """

    name: str
    of: tuple[str, ...]
    read: Read
    becomes: Becomes
    default: Callable[[str], object] = field(default=lambda command: None)
    older: tuple[str, ...] = ()
    secret: bool = False
    empty: bool = False

    @property
    def id(self) -> str:
        """What the rules call it."""
        return self.name


def value_of(setting: Setting, command: str, words: list[str] | None) -> object:
    """From the words that were given; None of null. Raises ValueError, saying what is wrong."""
    if words is not None:
        return read_value(setting.read, words)
    numeric = setting.read.kind in (int, float) and isinstance(setting.becomes, Part)
    if numeric and setting.default(command) is not None and not setting.empty:
        raise ValueError("It must be a number.")
    return None


def of_each(otherwise: object = None, **commands: object) -> Callable[[str], object]:
    """A default, of some commands another one."""
    return lambda command: commands.get(command, otherwise)


def several(
    names: str, of: str, read: Read, becomes: Becomes, default: object = None
) -> tuple[Setting, ...]:
    """Settings that are alike. names, of: with blanks between them."""
    return tuple(
        Setting(name, tuple(of.split()), read, becomes, of_each(default)) for name in names.split()
    )
