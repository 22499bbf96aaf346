"""Read the settings of a command line, and convert their words to values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TypeAlias

from plimsoll.config.problems import Problem, invalid
from plimsoll.config.secrets import MASK, is_secret
from plimsoll_convert.absences import Absence


class _NoValue:
    """Stand for a value that only the user can give."""


NO_VALUE = _NoValue()


@dataclass(frozen=True)
class Sourced:
    """A value and its origin.

    Attributes:
        value: The value, or NO_VALUE if there is only something to check.
        settings: Ids of the settings from which the value was made; empty if it follows from how
            the program was started.
        note: How the value was made.
        check: What the user should check; "" for nothing.
    """

    value: object
    settings: tuple[str, ...] = ()
    note: str = ""
    check: str = ""


Value = Sourced | None
Keys: TypeAlias = "Mapping[str, Keys | Value]"
"""Values by the keys of a config, nested or dotted, such as `zero.stage`. A key after `/` is at the
top level. A value under the key "" is the section's own. None: the command does not set the key."""


@dataclass(frozen=True)
class ValueReader:
    """The rules by which the words after a setting become its value.

    Attributes:
        kind: Type to which each word is converted. A `bool` needs no word.
        least: Smallest number of words.
        most: Largest number of words; None for no limit.
        lowest: Smallest allowed value.
        among: The allowed values; empty if all are allowed.
    """

    kind: type
    least: int = 1
    most: int | None = 1
    lowest: int | None = None
    among: tuple[str, ...] = ()


SWITCH = ValueReader(bool, 0, 0)
BOOL = ValueReader(bool, 0, 1)
WHOLE = ValueReader(int)
COUNT = ValueReader(int, lowest=1)
NUMBER = ValueReader(float)
TEXT = ValueReader(str)
PAIR = ValueReader(float, 2, 2)
BOUNDS = ValueReader(float, 1, 2)
NUMBERS = ValueReader(float, 1, None)
WORDS = ValueReader(str, 0, None)

_NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
"""Matches words with a dash that argparse reads as a number, not as an option."""
_TRUE, _FALSE = ("true", "yes", "on", "1", "y", "t"), ("false", "no", "off", "0", "n", "f")


def one_of(*values: str) -> ValueReader:
    """Return a reader that accepts exactly one word, which is one of `values`."""
    return ValueReader(str, among=values)


def read_value(reader: ValueReader, words: Sequence[str]) -> object:
    """Return the value of some words: a tuple if the reader allows several words.

    Raises:
        ValueError: The words cannot be converted. The message says why.
    """
    if reader.kind is bool:
        return _read_bool(words[0]) if words else True
    if len(words) < reader.least:
        wanted = "a value" if reader.least == 1 else f"{reader.least} values"
        raise ValueError(f"It takes {wanted}, and {len(words) or 'none'} follows.")
    values = [_read_word(reader, word) for word in words]
    return values[0] if reader.most == 1 else tuple(values)


def _read_bool(word: str) -> bool:
    if word.lower() not in _TRUE + _FALSE:
        raise ValueError("It must be true or false.")
    return word.lower() in _TRUE


def _read_word(reader: ValueReader, word: str) -> object:
    try:
        value = reader.kind(word)
    except ValueError as error:
        kind = "a whole number" if reader.kind is int else "a number"
        raise ValueError(f"It must be {kind}.") from error
    if isinstance(value, float) and not isfinite(value):
        raise ValueError("It must be a finite number.")
    if reader.lowest is not None and value < reader.lowest:
        raise ValueError(f"It must be {reader.lowest} or more.")
    if reader.among and value not in reader.among:
        raise ValueError(f"It must be one of {', '.join(reader.among)}.")
    return value


@dataclass(frozen=True)
class Setting:
    """A setting of a trainer of which only one version is read.

    Attributes:
        name: The setting's name, which is also its id.
        of: Commands that have the setting.
        reader: How words are converted to a value.
        default: Takes a command; returns the trainer's default.
        older: Earlier names.
        empty: Whether the setting may be null although its default is not.
        absent: Why the setting has no counterpart; None if it has one.
    """

    name: str
    of: tuple[str, ...]
    reader: ValueReader
    default: Callable[[str], object] = field(default=lambda command: None)
    older: tuple[str, ...] = ()
    empty: bool = False
    absent: Absence | None = None

    @property
    def id(self) -> str:
        """The name by which converters look the setting up."""
        return self.name


def settings(
    names: str,
    of: str,
    reader: ValueReader,
    default: object = None,
    *,
    older: str = "",
    empty: bool = False,
    **by_command: object,
) -> tuple[Setting, ...]:
    """Return several settings with the same properties.

    Args:
        names: The settings' names, separated by blanks.
        of: Commands that have the settings, separated by blanks.
        reader: How words are converted to a value.
        default: The default of all settings.
        older: Earlier names, separated by blanks.
        empty: Whether the settings may be null although the default is not.
        by_command: Defaults that differ, by command.
    """

    def default_of(command: str) -> object:
        return by_command.get(command, default)

    return tuple(
        Setting(name, tuple(of.split()), reader, default_of, tuple(older.split()), empty=empty)
        for name in names.split()
    )


def with_defaults(table: Iterable[Setting], defaults: Mapping[str, object]) -> list[Setting]:
    """Return the settings, some with the defaults of another version, which are given by name."""

    def replaced(setting: Setting) -> Setting:
        if setting.name not in defaults:
            return setting
        value = defaults[setting.name]
        return replace(setting, default=lambda command: value)

    return [*map(replaced, table)]


def absent(
    reason: Absence, of: str, names: str, reader: ValueReader = WORDS, default: object = None
) -> tuple[Setting, ...]:
    """Return settings without a counterpart. `of` and `names` are separated by blanks."""
    return tuple(
        replace(setting, absent=reason, empty=True)
        for setting in settings(names, of, reader, default)
    )


def settings_of(table: Iterable[Setting], command: str) -> tuple[Setting, ...]:
    """Return the settings in a table that a command has."""
    return tuple(setting for setting in table if command in setting.of)


def by_name(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Return the settings by name; a setting is also under each of its earlier names."""
    return {name: setting for setting in settings for name in (setting.name, *setting.older)}


def value_of(read: Setting, command: str, words: Sequence[str] | None) -> object:
    """Return the value of a setting from its words; `words` is None for null.

    Raises:
        ValueError: The words cannot be converted, or null is not allowed.
    """
    if words is not None:
        most = read.reader.most
        if most is not None and len(words) > most:
            raise ValueError(f"It takes {most or 'no'} word{'s' * (most != 1)}: quote the value.")
        return read_value(read.reader, words)
    if read.reader.kind in (int, float) and read.default(command) is not None and not read.empty:
        raise ValueError("It must be a number.")
    return None


@dataclass(frozen=True)
class Typed:
    """A typed option: its name without dashes, and the words that follow it."""

    name: str
    words: tuple[str, ...]


def split_flags(words: Sequence[str]) -> tuple[list[Typed], list[Problem]]:
    """Return all options with their words, and a problem for each word before the first option."""
    options: list[tuple[str, list[str]]] = []
    stray: list[Problem] = []
    for word in words:
        if word.startswith("-") and word != "-" and not _NEGATIVE.match(word):
            name, equals, after = word.partition("=")
            options.append((name.lstrip("-"), [after] if equals else []))
        elif options:
            options[-1][1].append(word)
        else:
            why = "It follows no flag."
            stray.append(invalid(shlex.quote(word), None, why, "leave it out, or quote the value"))
    return [Typed(name, tuple(values)) for name, values in options], stray


def join_words(start: str, words: Sequence[str]) -> str:
    """Return a name and its words as one line, quoted for a shell; `***` if they are secret."""
    if is_secret(start):
        return f"{start} {MASK}"
    quoted = (shlex.quote(word) if word.isprintable() else repr(word) for word in words)
    return " ".join([start, *quoted])


def format_value(value: object) -> str:
    """Return a value as text in the form that users type."""
    if isinstance(value, tuple):
        return " ".join(map(format_value, value))
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if isinstance(value, str) and not value.isprintable() else f"{value}"


def format_flag(name: str, value: object) -> str:
    """Return a default as flag text: `NAME VALUE`, `NAME` if true, `no NAME` if false or None."""
    if value is None or value is False:
        return f"no {name}"
    return name if value is True else f"{name} {format_value(value)}"


def positive(value: float | None) -> float | None:
    """Return the value if it is above 0, else None: 0 and negative values turn a setting off."""
    return value if value is not None and value > 0 else None
