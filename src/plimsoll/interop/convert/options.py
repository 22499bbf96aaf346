"""Hold what a foreign command says, and what is said about it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.config.problems import Problem, invalid, refuse
from plimsoll.interop.convert.absences import Absence, RemarkKind
from plimsoll.interop.convert.foreign import Sourced
from plimsoll.interop.convert.launch import Launch
from plimsoll.interop.convert.values import Setting, format_flag, value_of


@dataclass(frozen=True)
class Remark:
    """A remark on a setting from which no key was made.

    Attributes:
        kind: `same`: Plimsoll does so without a key. `idle`: it has no effect here. `lacking`:
            Plimsoll has nothing like it, and it is left out. `unknown`: the trainer has no such
            setting, and it is left out. `check`: the user should look at it.
        about: Id of a setting; for `check` also a key of the config, for `unknown` the words.
        why: The reason.
    """

    kind: RemarkKind
    about: str
    why: str


@dataclass(frozen=True)
class Options:
    """The settings of a command.

    Attributes:
        command: The command, as the trainer's table calls it.
        launch: How it was started.
        values: Value of every setting, given or default, by id.
        typed: The settings that were given, each as it was typed.
        names: How this version spells each setting.
        absent: Why settings have no counterpart.
        remarks: Remarks on what was typed.
        cards: Cards of a machine, if the user says it.
        version: Version of the trainer.
        rl: Whether the command samples and learns.
        pairs: Whether it learns from pairs.
        has_critic: Whether it trains a critic.
        show_default: Shows a default, from its name and value.
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
        """Return the first of these settings that the version has; else the last."""
        return next((id for id in ids if id in self.values), ids[-1])

    def given(self, *ids: str) -> list[str]:
        """Return those of these settings that were typed."""
        return [id for id in ids if id in self.typed]

    def show(self, *ids: str) -> str:
        """Return settings as they were typed, or with their defaults."""
        return " ".join(
            self.typed[id] if id in self.typed else self.show_default(self.names[id], self[id])
            for id in ids
        )

    def trace(self, value: object, *ids: str, note: str = "", check: str = "") -> Sourced:
        """Return a value made of those of these settings that the version has."""
        return Sourced(value, tuple(id for id in ids if id in self.values), note, check)

    def take(
        self, id: str, convert: Callable[[Any], object] = lambda value: value, note: str = ""
    ) -> Sourced | None:
        """Return the converted value of one setting, or None if nothing is left of it."""
        value = None if self[id] is None else convert(self[id])
        return None if value is None else self.trace(value, id, note=note)


@dataclass(frozen=True)
class Assignment:
    """A setting that was given.

    Attributes:
        name: Its name as it was typed.
        words: Its words; None for null.
        text: All of it as it was typed.
        setting: The setting; None if there is none of this name.
        unknown: Why there is none.
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
    """Return the settings of a command.

    Args:
        command: The command.
        launch: How it was started.
        settings: All settings of the command, as this version spells them.
        assignments: What was given; of two names of a setting the later one counts.
        remedy: What to do about a value that cannot be read.
        problems: Problems that are known already.

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
            text = " ".join(given.words or ()) or None
            problems.append(invalid(given.name, text, str(error), remedy))
    refuse(problems)
    names = {setting.id: name for name, setting in settings.items()}
    absent = {s.id: s.absent for s in settings.values() if s.absent is not None}
    return Options(command, launch, values, texts, names, absent, tuple(remarks))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question for the known names that are nearest to a name; "" if none is near."""
    close = difflib.get_close_matches(name, known, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""
