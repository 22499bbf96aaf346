"""A command of OpenRLHF's as it was read: the value of every flag that it has in its version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll.convert.launch import Launch
from plimsoll.convert.openrlhf.version import Version
from plimsoll.convert.outcome import Entry, Remark

OF_RL = ("ppo", "local")
OF_PAIRS = ("rm", "dpo")


@dataclass(frozen=True)
class Options:
    """values: of every flag, given or default, by the flags' ids. typed: those that were given, as
    they were typed. names: how the version spells them, with dashes. cards: of a machine, where
    the user says it."""

    command: str
    version: Version
    launch: Launch
    values: Mapping[str, Any]
    typed: Mapping[str, str]
    names: Mapping[str, str]
    cards: int | None = None

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
        name, value = self.names[flag], self.values[flag]
        if value is None or value is False:
            return f"no {name}"
        return name if value is True else f"{name} {spelled(value)}"

    @property
    def rl(self) -> bool:
        return self.command in OF_RL

    @property
    def pairs(self) -> bool:
        return self.command in OF_PAIRS

    @property
    def has_critic(self) -> bool:
        return self.rl and self["advantage_estimator"] == "gae"

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
