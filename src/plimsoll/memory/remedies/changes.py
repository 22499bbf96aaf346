"""Changes to a config: as remedies in words, as a diff, as flags; and the config that comes of
them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from plimsoll.config.base import Settings
from plimsoll.config.flags import Flag, apply_flags
from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import Tree
from plimsoll.errors import ConfigError, SettingsConflict
from plimsoll.spec.rules.settings import check_agreement
from plimsoll.spec.run_spec import RunSpec, resolve

Value = bool | int | float | str | None
Move = Mapping[str, Value]
"""Dotted keys and what they become."""


@dataclass(frozen=True)
class Remedy:
    """What to do where memory lacks.

    changes: to the config, as they can be written.
    words: what follows them, or all there is to say where no value is known.
    """

    changes: Move = field(default_factory=dict)
    words: str = ""

    @property
    def text(self) -> str:
        """For a person. One of several keys has "with" between them."""
        written = " with ".join(_shown(key, value) for key, value in self.changes.items())
        return f"{written} {self.words}".strip()


def _shown(key: str, value: Value) -> str:
    return f"{key}: {value:.2f}" if isinstance(value, float) else f"{key}: {show(value)}"


def one_of(remedies: Iterable[Remedy]) -> str:
    """Any of them, as the text of a fix."""
    return ", or ".join(remedy.text for remedy in remedies)


@dataclass(frozen=True)
class Change:
    """One key that is written anew. before: what holds without; None where the key's section is
    not there."""

    key: str
    before: Value
    after: Value

    @property
    def flag(self) -> str:
        """As it is typed."""
        return f"--{self.key} {show(self.after)}"

    @property
    def lines(self) -> tuple[str, ...]:
        """As a diff."""
        gone = () if self.before is None else (f"- {self.key}: {show(self.before)}",)
        return (*gone, f"+ {self.key}: {show(self.after)}")


def changes_between(spec: RunSpec[Any], values: Mapping[str, Value]) -> tuple[Change, ...]:
    """Those that bring keys to `values`; keys that have them already are left out."""
    made = (Change(key, value_at(spec.config, key), after) for key, after in values.items())
    return tuple(change for change in made if change.before != change.after)


def flags_of(changes: Iterable[Change]) -> list[Flag]:
    """To write the changes over values, or into a text."""
    return [Flag(tuple(change.key.split(".")), change.after) for change in changes]


def changed(spec: RunSpec[Any], changes: Sequence[Change]) -> RunSpec[Any] | None:
    """The run with the changes made in its config; None where its settings then contradict one
    another. Sections without a change are checked already, and stay."""
    flags = flags_of(changes)
    sections = spec.config.model_dump(include={flag.path[0] for flag in flags})
    try:
        tree = apply_flags(Tree({**dict(spec.config), **sections}, {}), flags)
        made = resolve(spec.job, spec.job.config.model_validate(tree.values))
        check_agreement(made)
    except (ValidationError, ConfigError, SettingsConflict):
        return None
    return made


def value_at(settings: Settings, key: str) -> Value:
    """What a dotted key of settings has; None where one of its sections is not there."""
    found: object = settings
    for name in key.split("."):
        if found is not None:
            found = found.get(name) if isinstance(found, Mapping) else getattr(found, name)
    assert found is None or isinstance(found, bool | int | float | str), key
    return found
