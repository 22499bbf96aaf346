"""The record of a flag of OpenRLHF's, over the versions from 0.6.0 to 0.11.2 and over its commands;
what it becomes; and values as argparse reads them.

Names and defaults are those of `openrlhf/cli/train_*.py` at each of its releases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from plimsoll.convert.openrlhf.options import Options
from plimsoll.convert.openrlhf.version import FIRST, LAST, Version, parse_version
from plimsoll.convert.outcome import Outcome

COMMANDS = {
    "ppo": "train_ppo_ray",
    "local": "train_ppo",
    "sft": "train_sft",
    "rm": "train_rm",
    "dpo": "train_dpo",
    "kto": "train_kto",
    "kd": "train_kd",
    "prm": "train_prm",
}
"""By the names that the table has for them."""
DOTTED = (0, 10, 2)
"""The first version whose flags have dots."""
_UNTIL = {"local": (0, 6, 1), "kto": (0, 9, 5), "kd": (0, 9, 5), "prm": (0, 9, 5)}
"""The last version with a command."""

Rule = Callable[[Options], Iterator[Outcome]]
Default = Callable[[str, Version], object]


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


@dataclass(frozen=True)
class Flag:
    """One setting.

    flat: its name up to 0.10.1, None where it had none. dotted: its names from 0.10.2 on; a word
    `ppo:NAME` is of that command alone. of: the commands that have it, each with the versions
    where not all: `rm,kd@0.8.0`, `ppo@0.6.2-0.9.0`. read: how its words become a value. default:
    that of argparse. secret: its value is never shown.
    """

    flat: str | None
    dotted: str
    of: str
    read: Read
    becomes: Becomes
    default: Default = field(default=lambda command, version: None)
    secret: bool = False

    @property
    def id(self) -> str:
        """What the rules call it."""
        return self.flat or self.dotted.split()[0].rpartition(":")[2]

    def name(self, command: str, version: Version) -> str | None:
        """As that command spells it in that version, without dashes; None where it is not there."""
        if not any(since <= version <= until for since, until in self._spans(command)):
            return None
        if version < DOTTED:
            return self.flat
        names = [word.partition(":") for word in self.dotted.split()]
        own = {who: name for who, colon, name in names if colon}
        shared = [who for who, colon, _ in names if not colon]
        return own.get(command) or next(iter(shared), None)

    def _spans(self, command: str) -> Iterator[tuple[Version, Version]]:
        for word in self.of.split():
            who, _, when = word.partition("@")
            if command in who.split(","):
                since, _, until = when.partition("-")
                last = parse_version(until) if until else LAST
                yield (
                    parse_version(since) if since else FIRST,
                    min(last, _UNTIL.get(command, LAST)),
                )


def always(value: object) -> Default:
    """The same in every command and version."""
    return lambda command, version: value


def moved(value: object, *later: tuple[str, object]) -> Default:
    """Other values from these versions on."""
    steps = [(parse_version(since), other) for since, other in later]

    def default(command: str, version: Version) -> object:
        found = value
        for since, other in steps:
            found = other if version >= since else found
        return found

    return default


def each(otherwise: object = None, **commands: object) -> Default:
    """Of each command its own; a value, or what `moved` gives."""

    def default(command: str, version: Version) -> object:
        found = commands.get(command, otherwise)
        return found(command, version) if callable(found) else found

    return default


_NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
"""What argparse takes for a number, not for an option."""


def is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NEGATIVE.match(word)


def read_value(read: Read, words: list[str]) -> object:
    """From the words after a flag, as many as it takes. Raises ValueError, saying what is wrong."""
    if read.kind is bool:
        return not read.off
    if len(words) < read.least:
        wanted = "a value" if read.least == 1 else f"{read.least} values"
        raise ValueError(f"It takes {wanted}, and {len(words) or 'none'} follows.")
    values = [_one(read, word) for word in words]
    return values[0] if read.one else tuple(values)


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
