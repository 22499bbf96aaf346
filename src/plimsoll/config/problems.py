"""The common form of problems: of settings, a plan, the inputs of a run, or a machine.

Every rule has a stable code; docs/rules.md explains each. A code names what is wrong, whichever
rule finds it: several rules may share one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Literal, ParamSpec

import yaml

from plimsoll.config.base import Choice, Settings
from plimsoll.config.secrets import mask_urls
from plimsoll.config.yaml_tree import Origins, nearest_origin, origin_of
from plimsoll.errors import ConfigError, SettingsConflict

Code = str
"""The stable code of a rule, such as `kl-reference`. docs/rules.md has a line for each."""

_ROOM: frozenset[Code] = frozenset(
    {
        "device-memory",
        "disk-space",
        "host-memory",
        "less-than-planned",
        "more-ranks-than-gpus",
        "no-gpu",
        "tensor-parallel-node",
        "vllm-cache",
        "vllm-share",
        "vllm-share-beside-training",
        "vllm-share-not-free",
    }
)
"""Codes of problems that other hardware, or less of something, would solve."""
UNSTARTED: frozenset[Code] = frozenset({"vllm-cache", "vllm-share"})
"""Codes of engines that would not start, for lack of memory for one sequence."""
UNPLACED: frozenset[Code] = frozenset({"more-ranks-than-gpus"})
"""Codes of ranks and engines that no card is left for."""
CROWDED: frozenset[Code] = frozenset({"vllm-share-beside-training"})
"""Codes of a card that would hold the engine or the ranks, but not both."""


_LONGEST_VALUE = 120
_DOTTED_KEY = re.compile(r"\b[a-z_]\w*(?:\.[a-z_]\w*)+")

Severity = Literal["ok", "warning", "error"]

Facts = ParamSpec("Facts")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; or, with severity `ok`, a check that passed.

    Attributes:
        code: the code of the rule, if it has one: docs/rules.md says more of it.
        severity: `error` if it does not work.
        what: the value of the key as `show` gives it ("" if the key is missing), or the figures.
        why: what is wrong with it and why.
        fix: what to write or do instead.
        key: the subject, if the figures do not say it: a dotted key, or a part of the machine.
        where: the line or the flag that set the value, if known.
        invalid: whether the value can never work, whatever else is set (exit code 2).
    """

    code: Code | None
    severity: Severity
    what: str
    why: str = ""
    fix: str = ""
    key: str = ""
    where: str = ""
    invalid: bool = False

    @property
    def is_conflict(self) -> bool:
        """Whether settings cannot work together (exit code 4).

        These are the errors that other hardware would not solve, and that depend on other keys.
        """
        mended = self.invalid or self.code is None or self.code in _ROOM
        return self.severity == "error" and not mended

    def __str__(self) -> str:
        """Return the problem as an entry in a list of problems of settings."""
        setting = f"{self.key}: {self.what}" if self.what else self.key
        place = f"   ({self.where})" if self.where else ""
        code = f"[{self.code}] " if self.code else ""
        return f"  {setting}{place}\n      {code}{self.why}\n      -> {self.fix}"


def invalid(
    key: str, value: str | None, why: str, fix: str, where: str = "", code: Code | None = None
) -> Problem:
    """Return the problem of a setting that can never work, or of an input that cannot be used.

    `value` is None if it is missing.
    """
    return Problem(code, "error", value or "", why, fix, key, where, invalid=True)


def conflict(key: str, value: str, why: str, fix: str, code: Code) -> Problem:
    """Return the problem of a setting that is valid by itself, but not with another setting."""
    return Problem(code, "error", value, why, fix, key)


@dataclass(frozen=True)
class Section:
    """Settings, and the dotted key that they are written under ("" for a whole config).

    Its methods make problems of a key, and fill in the key's value.
    """

    key: str
    settings: Settings

    def invalid(self, name: str, why: str, fix: str, code: Code | None = None) -> Problem:
        """Return the problem of a dotted key in the section, as `invalid`."""
        return invalid(self._full(name), self._value(name), why, fix, code=code)

    def conflict(self, name: str, why: str, fix: str, code: Code) -> Problem:
        """Return the problem of a dotted key in the section, as `conflict`."""
        return conflict(self._full(name), self._value(name) or "", why, fix, code)

    def _full(self, name: str) -> str:
        return f"{self.key}.{name}" if self.key else name

    def _value(self, name: str) -> str | None:
        value = attrgetter(name)(self.settings)
        if isinstance(value, Choice):
            return value.name
        if isinstance(value, Settings):
            return "given"
        return str(value) if isinstance(value, float) else None if value is None else show(value)


def finding(key: str, severity: Severity, what: str, why: str = "", fix: str = "") -> Problem:
    """Return the finding about a part of the machine, without why and fix if it is `ok`."""
    reasons = ("", "") if severity == "ok" else (why, fix)
    return Problem(None, severity, what, *reasons, key)


def find(
    rules: Iterable[Callable[Facts, Iterable[Problem]]], *args: Facts.args, **kwargs: Facts.kwargs
) -> Iterator[Problem]:
    """Yield the problems that rules find in the same facts, in the order of the rules."""
    return chain.from_iterable(rule(*args, **kwargs) for rule in rules)


def refuse(problems: Iterable[Problem], origins: Origins = MappingProxyType({})) -> None:
    """Raise one error that lists every problem; return if there is none.

    Args:
        problems: what is wrong.
        origins: where keys were written, for problems that do not say it themselves.

    Raises:
        SettingsConflict: (exit code 4) all of them are conflicts.
        ConfigError: (exit code 2) at least one is not.
    """
    located = [replace(p, where=p.where or _where(p, origins)) for p in problems]
    if not located:
        return
    kind = SettingsConflict if all(problem.is_conflict for problem in located) else ConfigError
    count = "1 problem" if len(located) == 1 else f"{len(located)} problems"
    raise kind("\n".join([f"{count} in the settings", *map(str, located)]))


def _where(problem: Problem, origins: Origins) -> str:
    """Return where the first key that the problem names was written; "" if unknown.

    That may be another key than the problem's: a default can only be wrong together with a key
    that was written.
    """
    path = tuple(problem.key.split("."))
    at = origin_of(origins, path) if problem.what else nearest_origin(origins, path)
    if at:
        return at
    named = [name for name in _DOTTED_KEY.findall(problem.why) if name != problem.key]
    places = {name: origin_of(origins, tuple(name.split("."))) for name in named}
    return next((f"{name}: {at}" for name, at in places.items() if at), "")


def show(value: object) -> str:
    """Return a value as one line of YAML, cut if it is very long, without what URLs may hide."""
    if isinstance(value, str) and "\n" in value:
        line = json.dumps(value, ensure_ascii=False)
    else:
        text = yaml.safe_dump(
            value, default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False
        )
        line = " ".join(text.removesuffix("...\n").split())
    line = mask_urls(line)
    return line if len(line) <= _LONGEST_VALUE else line[:_LONGEST_VALUE] + " ..."
