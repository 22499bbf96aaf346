"""What is wrong with the settings, said in one way and all at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import yaml

from plimsoll.errors import ConfigError, SettingsConflict

_LONGEST_VALUE = 120


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    key: the dotted key. value: as `show` gives it; None where the key is missing.
    why: what is wrong and why. instead: what to write or do.
    where: the line or the flag that set it, where known.
    conflict: True where each setting is right by itself but not beside another one.
    """

    key: str
    value: str | None
    why: str
    instead: str
    where: str = ""
    conflict: bool = False

    def __str__(self) -> str:
        setting = self.key if self.value is None else f"{self.key}: {self.value}"
        place = f"   ({self.where})" if self.where else ""
        return f"  {setting}{place}\n      {self.why}\n      -> {self.instead}"


def refuse(problems: Iterable[Problem]) -> None:
    """Raise one error that lists every problem; return where there is none.

    Raises SettingsConflict (exit code 4) when all of them are conflicts, else ConfigError (2).
    """
    found = list(problems)
    if not found:
        return
    kind = SettingsConflict if all(problem.conflict for problem in found) else ConfigError
    count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    raise kind("\n".join([f"{count} in the settings", *map(str, found)]))


def show(value: object) -> str:
    """A value as one line of YAML, cut where it is very long."""
    text = yaml.safe_dump(
        value, default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False
    )
    line = " ".join(text.removesuffix("...\n").split())
    return line if len(line) <= _LONGEST_VALUE else line[:_LONGEST_VALUE] + " ..."
