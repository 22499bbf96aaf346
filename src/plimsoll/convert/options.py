"""A command of another trainer's as it was read: the value of every setting that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll.convert.launch import Launch
from plimsoll.convert.outcome import Entry, Remark


def as_flag(name: str, value: object) -> str:
    """A default, as a flag says it."""
    if value is None or value is False:
        return f"no {name}"
    return name if value is True else f"{name} {spelled(value)}"


@dataclass(frozen=True)
class Options:
    """command: as the trainer's table calls it. values: of every flag, given or default, by the
    flags' ids. typed: those that were given, as they were typed. names: how the version spells
    them, with dashes. cards: of a machine, where the user says it. version: of the trainer. rl: it
    samples and learns. pairs: it learns from pairs. has_critic: of `rl`. default: how a default is
    told."""

    command: str
    launch: Launch
    values: Mapping[str, Any]
    typed: Mapping[str, str]
    names: Mapping[str, str]
    cards: int | None = None
    version: tuple[int, ...] = ()
    rl: bool = False
    pairs: bool = False
    has_critic: bool = False
    default: Callable[[str, object], str] = as_flag

    def __getitem__(self, flag: str) -> Any:
        """None where the version has no such flag."""
        return self.values.get(flag)

    def first(self, *flags: str) -> str:
        """The id of the first of these that the version has; else of the last."""
        return next((flag for flag in flags if flag in self.values), flags[-1])

    def given(self, *flags: str) -> list[str]:
        """Those that were typed."""
        return [flag for flag in flags if flag in self.typed]

    def entry(self, key: str, value: object, *flags: str, note: str = "") -> Entry:
        """Made of those of these flags that the version has."""
        return Entry(key, value, tuple(flag for flag in flags if flag in self.values), note)

    def idle(self, why: str, *flags: str) -> list[Remark]:
        """On each of these that was typed."""
        return [Remark("idle", flag, why) for flag in self.given(*flags)]

    def same(self, why: str, *flags: str) -> list[Remark]:
        """On each of these that was typed."""
        return [Remark("same", flag, why) for flag in self.given(*flags)]

    def lacking(self, why: str, *flags: str) -> list[Remark]:
        """On each of these that was typed."""
        return [Remark("lacking", flag, why) for flag in self.given(*flags)]

    def shown(self, flag: str) -> str:
        """As it was typed, or with its default."""
        if flag in self.typed:
            return self.typed[flag]
        return self.default(self.names[flag], self.values[flag])

    @property
    def learners(self) -> tuple[str, ...]:
        """The roles that learn."""
        return ("actor", "critic") if self.has_critic else ("actor",)


def spelled(value: object) -> str:
    """A value as it would be typed."""
    if isinstance(value, tuple):
        return " ".join(map(spelled, value))
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if isinstance(value, str) and not value.isprintable() else f"{value}"
