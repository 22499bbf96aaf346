"""Describe a flag of OpenRLHF in all versions and commands.

Names and defaults are those of `openrlhf/cli/train_*.py` at each release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

from plimsoll.errors import ConfigError
from plimsoll_convert.absences import Absence
from plimsoll_convert.values import WORDS, ValueReader

Version = tuple[int, int, int]
Default = Callable[[str, Version], object]

RELEASES: tuple[Version, ...] = tuple(
    (0, minor, patch)
    for minor, patches in ((8, 12), (9, 11), (10, 5), (11, 3))
    for patch in range(patches)
)
FIRST, LAST = RELEASES[0], RELEASES[-1]
COMMANDS = {
    "ppo": "train_ppo_ray",
    "sft": "train_sft",
    "rm": "train_rm",
    "dpo": "train_dpo",
    "kto": "train_kto",
    "kd": "train_kd",
}
"""Programs by the short names that the flags' table uses for them."""
_DOTTED = (0, 10, 2)
"""The first version whose flags have dots."""
_UNTIL = {"kto": (0, 9, 5), "kd": (0, 9, 5)}
"""The last version that has a command, for commands that were removed."""


@cache
def parse_version(text: str) -> Version:
    """Return the version of a text such as `0.8.2`."""
    major, minor, patch = (int(part) for part in text.split("."))
    return major, minor, patch


def format_version(version: Version) -> str:
    """Return a version as `0.8.2`."""
    return ".".join(map(str, version))


def given_version(text: str) -> Version:
    """Return the release that `--version` names; for `0.8` the last release of 0.8.

    Raises:
        ConfigError: There is no such release, or it cannot be converted.
    """
    plain = text.lower().removeprefix("v").partition(".post")[0]
    releases = [v for v in RELEASES if f"{format_version(v)}.".startswith(f"{plain}.")]
    if not releases:
        raise ConfigError(
            f"--version {text!r} is no release of OpenRLHF that is read: "
            f"{format_version(FIRST)} to {format_version(LAST)}. Leave it out: the flags say it."
        )
    return releases[-1]


@dataclass(frozen=True)
class VersionedFlag:
    """A flag of OpenRLHF, whose name and default may differ between versions and commands.

    Attributes:
        flat: The name up to 0.10.1; None if the flag did not exist.
        dotted: The names from 0.10.2 on; `ppo:NAME` is the name in that command only.
        of: Commands that have the flag, with versions unless all have it: `rm,kd@0.8.1`,
            `ppo@0.8.2-0.9.0`.
        reader: How words are converted to a value.
        default: Takes a command and a version; returns the parser's default.
        absent: Why the flag has no counterpart; None if it has one.
    """

    flat: str | None
    dotted: str
    of: str
    reader: ValueReader = WORDS
    default: Default = field(default=lambda command, version: None)
    absent: Absence | None = None

    @property
    def id(self) -> str:
        """The name by which the converter looks the flag up."""
        return self.flat or self.dotted.split()[0].rpartition(":")[2]

    def name(self, command: str, version: Version) -> str | None:
        """Return the flag's name without dashes in a command and version; None if it is missing."""
        if not any(since <= version <= until for since, until in self._spans(command)):
            return None
        if version < _DOTTED:
            return self.flat
        names = [word.rpartition(":") for word in self.dotted.split()]
        of_command = [name for who, _, name in names if who == command]
        return next(iter(of_command or [name for who, _, name in names if not who]), None)

    def _spans(self, command: str) -> Iterator[tuple[Version, Version]]:
        for word in self.of.split():
            who, _, when = word.partition("@")
            if command in who.split(","):
                since, _, until = when.partition("-")
                last = _UNTIL.get(command, LAST)
                yield (
                    parse_version(since) if since else FIRST,
                    min(parse_version(until), last) if until else last,
                )


def always(value: object) -> Default:
    """Return a function for `VersionedFlag.default` that always returns `value`."""
    return lambda command, version: value


def from_version(value: object, since: str, later: object) -> Default:
    """Return a default function: `value` before the version `since`, and `later` from it on."""
    return lambda command, version: later if version >= parse_version(since) else value


def by_command(otherwise: object = None, **commands: object) -> Default:
    """Return a default function with a value, or a `from_version`, for each command."""

    def default(command: str, version: Version) -> object:
        value = commands.get(command, otherwise)
        return value(command, version) if callable(value) else value

    return default


def flags(
    of: str, reader: ValueReader, names: str, default: object = None
) -> tuple[VersionedFlag, ...]:
    """Return several flags with the same properties. `names`: `FLAT=DOTTED` words."""
    pairs = (name.partition("=") for name in names.split())
    return tuple(
        VersionedFlag(flat or None, dotted, of, reader, always(default))
        for flat, _, dotted in pairs
    )
