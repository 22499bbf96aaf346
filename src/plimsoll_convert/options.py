"""Hold the settings of a foreign command, and remarks about them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.config.problems import Problem, invalid, refuse
from plimsoll.config.secrets import MASK, is_secret
from plimsoll_convert.absences import Absence, RemarkKind
from plimsoll_convert.launch import Launch
from plimsoll_convert.values import Setting, Sourced, format_flag, value_of


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


@dataclass(frozen=True)
class Options:
    """The settings of a command.

    Attributes:
        command: The command's name in the trainer's table.
        launch: How the program was started.
        values: Value of every setting, given or default, by id.
        typed: Text of each given setting as it was typed, by id.
        names: Name of each setting in this version, by id.
        absent: Reasons why settings have no counterpart, by id.
        remarks: Remarks on the typed settings.
        cards: Number of cards per machine; None if the user does not say it.
        version: Version of the trainer.
        rl: Whether the command samples responses and learns from them.
        pairs: Whether the command learns from pairs.
        has_critic: Whether the command trains a critic.
        show_default: Takes a setting's name and default; returns a text for messages.
    """

    command: str
    launch: Launch
    values: Mapping[str, Any]
    typed: Mapping[str, str]
    names: Mapping[str, str]
    absent: Mapping[str, Absence]
    remarks: tuple[Remark, ...] = ()
    cards: int | None = None
    version: tuple[int, ...] = ()
    rl: bool = False
    pairs: bool = False
    has_critic: bool = False
    show_default: Callable[[str, object], str] = format_flag

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

    def trace(self, value: object, *ids: str, note: str = "", check: str = "") -> Sourced:
        """Return a value with its origin: the ids among these that the version has."""
        return Sourced(value, tuple(id for id in ids if id in self.values), note, check)

    def take(
        self, id: str, convert: Callable[[Any], object] = lambda value: value, note: str = ""
    ) -> Sourced | None:
        """Return a setting's converted value with its origin; None if either value is None."""
        value = None if self[id] is None else convert(self[id])
        return None if value is None else self.trace(value, id, note=note)


@dataclass(frozen=True)
class Assignment:
    """A setting that was given.

    Attributes:
        name: The setting's name as typed.
        words: The words of its value; None for null.
        text: Name and value as typed.
        setting: The setting, or None if the trainer has no setting of this name.
        unknown: Why there is no such setting.
    """

    name: str
    words: tuple[str, ...] | None
    text: str
    setting: Setting | None
    unknown: str = ""


def read_settings(
    command: str,
    launch: Launch,
    settings: Mapping[str, Setting],
    assignments: Iterable[Assignment],
    remedy: str,
    problems: Sequence[Problem] = (),
) -> Options:
    """Return the options of a command: given values, and defaults for all other settings.

    Args:
        command: The command's name in the trainer's table.
        launch: How the program was started.
        settings: All settings of the command, by their names in this version.
        assignments: The given settings. If a setting is given twice, the later value counts.
        remedy: The remedy in messages about values that cannot be read.
        problems: Problems that were found before.

    Raises:
        ConfigError: Values cannot be read, or there are other problems.
    """
    values = {setting.id: setting.default(command) for setting in settings.values()}
    texts: dict[str, str] = {}
    remarks: list[Remark] = []
    problems = list(problems)
    for given in assignments:
        setting = given.setting
        if setting is None:
            remarks.append(Remark("unknown", given.text, given.unknown))
            continue
        if setting.id in texts:
            why = f"{given.name} is the same, and counts"
            remarks.append(Remark("idle", texts[setting.id], why))
        texts[setting.id] = given.text
        try:
            values[setting.id] = value_of(setting, command, given.words)
        except ValueError as error:
            text = MASK if is_secret(given.name) else " ".join(given.words or ()) or None
            problems.append(invalid(given.name, text, str(error), remedy))
    refuse(problems)
    names = {setting.id: name for name, setting in settings.items()}
    absent = {s.id: s.absent for s in settings.values() if s.absent is not None}
    return Options(command, launch, values, texts, names, absent, tuple(remarks))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return text that asks `did you mean` one of the known names; "" if none is similar."""
    close = difflib.get_close_matches(name, known, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""
