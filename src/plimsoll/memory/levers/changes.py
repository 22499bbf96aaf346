"""Changes to a config, shown as a diff or as flags, and the run that they result in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from plimsoll.config.base import Settings
from plimsoll.config.flags import Flag, apply_flags
from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import Tree
from plimsoll.errors import ConfigError, SettingsConflict
from plimsoll.resolve.roles import Role
from plimsoll.resolve.rules.settings import check_agreement
from plimsoll.resolve.run_spec import RunSpec, resolve
from plimsoll.timeline.levers import LeverValue


@dataclass(frozen=True)
class Change:
    """A new value for a key of the config."""

    key: str
    before: LeverValue
    """The value without the change; None if the key's section is not there."""
    after: LeverValue

    @property
    def flag(self) -> str:
        """The change as a flag of the command line."""
        return f"--{self.key} {show(self.after)}"

    @property
    def lines(self) -> tuple[str, ...]:
        """The change as a diff."""
        gone = () if self.before is None else (f"- {self.key}: {show(self.before)}",)
        return (*gone, f"+ {self.key}: {show(self.after)}")


def changes_between(spec: RunSpec[Any], values: Mapping[str, LeverValue]) -> tuple[Change, ...]:
    """Return the changes that set keys to these values, without keys that have them already."""
    made = (Change(key, value_at(spec.config, key), after) for key, after in values.items())
    return tuple(change for change in made if change.before != change.after)


def flags_of(changes: Iterable[Change]) -> list[Flag]:
    """Return a flag for each change, to apply to values or to the text of a config."""
    return [Flag(tuple(change.key.split(".")), change.after) for change in changes]


def apply_changes(spec: RunSpec[Any], changes: Iterable[Change]) -> RunSpec[Any] | None:
    """Return the run after changes to its written config; None if settings then conflict.

    Sections without a change are not checked again.
    """
    flags = flags_of(changes)
    sections = spec.written.model_dump(include={flag.path[0] for flag in flags})
    try:
        tree = apply_flags(Tree({**dict(spec.written), **sections}, {}), flags)
        made = resolve(spec.job, spec.job.config.model_validate(tree.values))
        check_agreement(made)
    except (ValidationError, ConfigError, SettingsConflict):
        return None
    return made


def split_key(spec: RunSpec[Any], key: str) -> tuple[Role | None, str]:
    """Split a key into the role whose section it is in, or None, and the rest of the key."""
    for role in spec.roles.values():
        if key.startswith(f"{role.key}."):
            return role, key.removeprefix(f"{role.key}.")
    return None, key


def value_at(settings: Settings, key: str) -> LeverValue:
    """Return the value of a dotted key of settings; None if one of its sections is missing."""
    value: object = settings
    for name in key.split("."):
        if value is not None:
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    assert value is None or isinstance(value, bool | int | float | str), key
    return value
