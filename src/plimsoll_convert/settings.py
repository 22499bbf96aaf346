"""Read the settings of a foreign command, and hold their values with remarks about them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, TypeAlias

from plimsoll.config.problems import Problem, invalid, refuse
from plimsoll.config.secrets import MASK, is_secret
from plimsoll.errors import ConfigError
from plimsoll_convert.absences import Absence, RemarkKind
from plimsoll_convert.launch import Launch


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


@dataclass(frozen=True)
class Remark:
    """A remark on a setting from which no key was made.

    Attributes:
        kind: `same`: Plimsoll does the same without a key. `idle`: the setting has no effect here.
            `lacking`: Plimsoll has nothing like it, so it is left out. `unknown`: the trainer has
            no such setting, so it is left out. `check`: the user should check it.
        about: Id of a setting. For `check` it may be a key of the config; for `unknown` it is the
            words as typed.
        why: The reason.
    """

    kind: RemarkKind
    about: str
    why: str


Value = Sourced | None
Keys: TypeAlias = "Mapping[str, Keys | Value | Remark]"
"""Values by the keys of a config, nested or dotted, such as `zero.stage`. A key after `/` is at the
top level. A value under the key "" is the section's own. None: the key is not written, nor are the
keys below it, even if a setting of the table has such a key. A remark may stand under any key."""


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


Convert = Callable[[Any], object]
"""Takes the value of a setting; returns the value of a key, or None if the key is not written."""


def unchanged(value: object) -> object:
    """Return the value."""
    return value


def or_none(value: object) -> object:
    """Return the value, or None if it is 0, empty or off."""
    return value or None


def positive(value: float | None) -> float | None:
    """Return the value if it is above 0, else None: 0 and negative values turn a setting off."""
    return value if value is not None and value > 0 else None


def not_negative(value: int) -> int:
    """Return the value, or 0 if it is negative."""
    return max(0, value)


@dataclass(frozen=True)
class Setting:
    """A setting of a trainer of which only one version is read.

    Attributes:
        name: The setting's name, by which converters look it up.
        of: Commands that have the setting.
        reader: How words are converted to a value.
        default: The trainer's default.
        absent: Why the setting has no counterpart; None if it has one.
        keys: Keys to which the setting is written without a further rule, separated by `+`. A key
            may end with `=TEXT`, which is written if the setting is on, or with the index of a
            part of the value, such as `[0]`.
        convert: How the value is converted for its keys.
        defaults: Defaults that differ, by command.
        older: Earlier names.
        empty: Whether the setting may be null although its default is not.
    """

    name: str
    of: tuple[str, ...]
    reader: ValueReader
    default: object = None
    absent: Absence | None = None
    keys: str = ""
    convert: Convert = unchanged
    defaults: Mapping[str, object] = field(default_factory=dict)
    older: tuple[str, ...] = ()
    empty: bool = False

    def default_of(self, command: str) -> object:
        """Return the default of a command."""
        return self.defaults.get(command, self.default)


def settings(
    names: str | Mapping[str, object],
    of: str,
    reader: ValueReader,
    default: object = None,
    *,
    empty: bool = False,
    absent: Absence | None = None,
    convert: Convert = unchanged,
    **defaults: object,
) -> tuple[Setting, ...]:
    """Return several settings with the same properties.

    Args:
        names: The settings' names, separated by blanks; with earlier names and keys:
            `NAME|OLDER|OLDER:KEY+KEY`. Or a mapping from such names to defaults.
        of: Commands that have the settings, separated by blanks.
        reader: How words are converted to a value.
        default: The default of all settings, if names have none.
        empty: Whether the settings may be null although the default is not.
        absent: Why the settings have no counterpart.
        convert: How values are converted for their keys.
        defaults: Defaults that differ, by command.
    """
    commands = tuple(of.split())
    by_name = dict.fromkeys(names.split(), default) if isinstance(names, str) else names
    made = []
    for word, value in by_name.items():
        written, _, keys = word.partition(":")
        name, *older = written.split("|")
        setting = Setting(name, commands, reader, value, absent, keys, convert)
        made.append(replace(setting, defaults=defaults, older=tuple(older), empty=empty))
    return tuple(made)


def absent(
    reason: Absence, names: Mapping[str, str], reader: ValueReader = WORDS, default: object = None
) -> tuple[Setting, ...]:
    """Return settings without a counterpart, whose names are given by the commands that have them.

    Names, and commands, are separated by blanks.
    """
    return tuple(
        setting
        for of, listed in names.items()
        for setting in settings(listed, of, reader, default, empty=True, absent=reason)
    )


def settings_of(
    table: Iterable[Setting], command: str, defaults: Mapping[str, object] | None = None
) -> tuple[Setting, ...]:
    """Return the settings in a table that a command has.

    Args:
        table: The settings.
        command: The command.
        defaults: Defaults of another version, by the settings' names.
    """
    others = defaults or {}
    return tuple(
        replace(setting, default=others[setting.name], defaults={})
        if setting.name in others
        else setting
        for setting in table
        if command in setting.of
    )


def by_name(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Return the settings by name; a setting is also under each of its earlier names."""
    return {name: setting for setting in settings for name in (setting.name, *setting.older)}


def read_value(setting: Setting, command: str, words: Sequence[str] | None) -> object:
    """Return the value of a setting from its words; `words` is None for null.

    Raises:
        ValueError: The words cannot be converted, or null is not allowed. The message says why.
    """
    reader = setting.reader
    if words is None:
        counted = reader.kind in (int, float) and setting.default_of(command) is not None
        if counted and not setting.empty:
            raise ValueError("It must be a number.")
        return None
    if reader.most is not None and len(words) > reader.most:
        most = f"{reader.most or 'no'} word{'s' * (reader.most != 1)}"
        raise ValueError(f"It takes {most}: quote the value.")
    if reader.kind is bool:
        word = words[0].lower() if words else "true"
        if word not in _TRUE + _FALSE:
            raise ValueError("It must be true or false.")
        return word in _TRUE
    if len(words) < reader.least:
        wanted = "a value" if reader.least == 1 else f"{reader.least} values"
        raise ValueError(f"It takes {wanted}, and {len(words) or 'none'} follows.")
    values = [_read_word(reader, word) for word in words]
    return values[0] if reader.most == 1 else tuple(values)


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


Typed = tuple[str, tuple[str, ...]]
"""A typed option: its name without dashes, and the words that follow it."""


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
    return [(name, tuple(values)) for name, values in options], stray


def join_words(start: str, words: Sequence[str]) -> str:
    """Return a name and its words as one line, quoted for a shell; `***` if they are secret."""
    if is_secret(start):
        return f"{start} {MASK}"
    quoted = (shlex.quote(word) if word.isprintable() else repr(word) for word in words)
    return " ".join([start, *quoted])


def format_flag(name: str, value: object) -> str:
    """Return a default as flag text: `NAME VALUE`, `NAME` if true, `no NAME` if false or None."""
    if value is None or value is False:
        return f"no {name}"
    return name if value is True else f"{name} {_format_value(value)}"


def _format_value(value: object) -> str:
    """Return a value as text in the form that users type."""
    if isinstance(value, tuple):
        return " ".join(map(_format_value, value))
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if isinstance(value, str) and not value.isprintable() else f"{value}"


@dataclass(frozen=True)
class Options:
    """The settings of a command.

    Attributes:
        command: The command's name in the trainer's table.
        launch: How the program was started.
        values: Value of every setting, given or default, by id.
        typed: Text of each given setting as it was typed, by id.
        names: Name of each setting in this version, by id.
        settings: All settings, by id.
        remarks: Remarks on the typed settings, and on words and files of the command.
        cards: Number of cards per machine; None if the user does not say it.
        version: Version of the trainer.
        show_default: Takes a setting's name and default; returns a text for messages.
    """

    command: str
    launch: Launch
    values: Mapping[str, Any]
    typed: Mapping[str, str]
    names: Mapping[str, str]
    settings: Mapping[str, Setting]
    remarks: tuple[Remark, ...] = ()
    cards: int | None = None
    version: tuple[int, ...] = ()
    show_default: Callable[[str, object], str] = format_flag

    @property
    def rl(self) -> bool:
        """Whether the command samples responses and learns from them."""
        return self.command in ("ppo", "grpo", "rloo")

    @property
    def pairs(self) -> bool:
        """Whether the command learns from pairs."""
        return self.command in ("rm", "reward", "dpo", "orpo", "cpo")

    @property
    def has_critic(self) -> bool:
        """Whether the command trains a critic."""
        return "gae" in (self["advantage_estimator"], self["algorithm.adv_estimator"])

    def __getitem__(self, id: str) -> Any:
        """Return the value of a setting, or None if the version has no such setting."""
        return self.values.get(id)

    def first(self, *ids: str) -> str:
        """Return the first of these ids that the version has, or the last if it has none."""
        return next((id for id in ids if id in self.values), ids[-1])

    def given(self, *ids: str) -> list[str]:
        """Return the ids among these whose settings were typed."""
        return [id for id in ids if id in self.typed]

    def show(self, *ids: str) -> str:
        """Return a text of these settings for messages: as typed, or with their defaults."""
        return " ".join(
            self.typed[id] if id in self.typed else self.show_default(self.names[id], self[id])
            for id in ids
        )

    def require(self, holds: object, why: str, *ids: str) -> None:
        """Raise ConfigError unless the condition holds: the text of these settings, and why."""
        if not holds:
            raise ConfigError(f"{self.show(*ids)}: {why}.")

    def require_given(self, id: str, what: str) -> None:
        """Raise ConfigError if a setting has no value; `what` says what it gives."""
        if not self[id]:
            raise ConfigError(f"{self.names[id]} is needed: {what}.")

    def trace(self, value: object, *ids: str, note: str = "", check: str = "") -> Sourced:
        """Return a value with its origin: the ids among these that the version has."""
        return Sourced(value, tuple(id for id in ids if id in self.values), note, check)

    def trace_if(self, holds: object, value: object, *ids: str, note: str = "") -> Value:
        """Return a value with its origin if the condition holds, else None."""
        return self.trace(value, *ids, note=note) if holds else None

    def take(self, id: str, convert: Convert = unchanged, note: str = "") -> Value:
        """Return a setting's converted value with its origin; None if either value is None."""
        value = None if self[id] is None else convert(self[id])
        return None if value is None else self.trace(value, id, note=note)

    def take_if(self, holds: object, id: str, convert: Convert = unchanged) -> Value:
        """Return a setting's converted value with its origin if the condition holds, else None."""
        return self.take(id, convert) if holds else None

    def leave_out(
        self, why: str, *ids: str, when: object = True, kind: RemarkKind = "lacking"
    ) -> Keys | None:
        """Return a remark on each of these settings that was given, by id; None unless `when`."""
        return {id: Remark(kind, id, why) for id in self.given(*ids)} if when else None

    def table_keys(self) -> dict[str, Sourced]:
        """Return the values of settings by the keys that the table names for them."""
        values: dict[str, Sourced] = {}
        for id, setting in self.settings.items():
            for target in filter(None, setting.keys.split("+")):
                key, equals, text = target.partition("=")
                key, _, index = key.partition("[")
                value = self.take(id, setting.convert)
                if value is not None and index:
                    value = self.trace(self[id][int(index[:-1])], id)
                elif equals:
                    value = self.trace_if(self[id], text, id)
                if value is not None:
                    values[key] = value
        return values


Assignment = tuple[Setting, str, tuple[str, ...] | None, str]
"""A given setting: the setting, its name as typed, the words of its value (None for null), and name
and value as typed."""


def read_settings(
    command: str,
    launch: Launch,
    settings: Mapping[str, Setting],
    assignments: Iterable[Assignment | Remark],
    remedy: str,
    problems: Sequence[Problem] = (),
    **facts: Any,
) -> Options:
    """Return the options of a command: given values, and defaults for all other settings.

    Args:
        command: The command's name in the trainer's table.
        launch: How the program was started.
        settings: All settings of the command, by their names in this version.
        assignments: The given settings, and remarks on names that are no settings. If a setting is
            given twice, the later value counts.
        remedy: The remedy in messages about values that cannot be read.
        problems: Problems that were found before.
        facts: Further attributes of the options.

    Raises:
        ConfigError: Values cannot be read, or there are other problems.
    """
    by_id = {setting.name: setting for setting in settings.values()}
    values = {id: setting.default_of(command) for id, setting in by_id.items()}
    texts: dict[str, str] = {}
    remarks: list[Remark] = []
    problems = list(problems)
    for given in assignments:
        if isinstance(given, Remark):
            remarks.append(given)
            continue
        setting, name, words, text = given
        if setting.name in texts:
            remarks.append(Remark("idle", texts[setting.name], f"{name} is the same, and counts"))
        texts[setting.name] = text
        try:
            values[setting.name] = read_value(setting, command, words)
        except ValueError as error:
            shown = MASK if is_secret(name) else " ".join(words or ()) or None
            problems.append(invalid(name, shown, str(error), remedy))
    refuse(problems)
    names = {setting.name: name for name, setting in settings.items()}
    return Options(command, launch, values, texts, names, by_id, tuple(remarks), **facts)
