"""What is wrong with the settings, said in one way and all at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType

import yaml

from plimsoll.config.codes import SettingCode
from plimsoll.config.yaml_tree import Origins, written_around, written_at
from plimsoll.errors import ConfigError, SettingsConflict

_LONGEST_VALUE = 120
_DOTTED_KEY = re.compile(r"\b[a-z_]\w*(?:\.[a-z_]\w*)+")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    key: the dotted key. value: as `show` gives it; None where the key is missing.
    why: what is wrong and why. instead: what to write or do.
    where: the line or the flag that set it, where known.
    code: of the rule, where it has one: docs/rules.md says more of it.
    conflict: True where each setting is right by itself but not beside another one.
    """

    key: str
    value: str | None
    why: str
    instead: str
    where: str = ""
    code: SettingCode | None = None
    conflict: bool = False

    def __str__(self) -> str:
        setting = self.key if self.value is None else f"{self.key}: {self.value}"
        place = f"   ({self.where})" if self.where else ""
        code = f"[{self.code}] " if self.code else ""
        return f"  {setting}{place}\n      {code}{self.why}\n      -> {self.instead}"


def refuse(problems: Iterable[Problem], origins: Origins = MappingProxyType({})) -> None:
    """Raise one error that lists every problem; return where there is none.

    origins: what problems that do not say where they were written are looked up in.
    Raises SettingsConflict (exit code 4) when all of them are conflicts, else ConfigError (2).
    """
    found = [replace(p, where=p.where or _where(p, origins)) for p in problems]
    if not found:
        return
    kind = SettingsConflict if all(problem.conflict for problem in found) else ConfigError
    count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    raise kind("\n".join([f"{count} in the settings", *map(str, found)]))


def _where(problem: Problem, origins: Origins) -> str:
    """Where the first key that the problem names was written. That may be another than its own:
    a default can be wrong only beside something that was written."""
    path = tuple(problem.key.split("."))
    at = written_around(origins, path) if problem.value is None else written_at(origins, path)
    if at:
        return at
    named = [name for name in _DOTTED_KEY.findall(problem.why) if name != problem.key]
    places = {name: written_at(origins, tuple(name.split("."))) for name in named}
    return next((f"{name}: {at}" for name, at in places.items() if at), "")


def show(value: object) -> str:
    """A value as one line of YAML, cut where it is very long."""
    if isinstance(value, str) and "\n" in value:
        return _cut(json.dumps(value, ensure_ascii=False))
    text = yaml.safe_dump(
        value, default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False
    )
    return _cut(" ".join(text.removesuffix("...\n").split()))


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST_VALUE else line[:_LONGEST_VALUE] + " ..."
