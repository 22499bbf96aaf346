"""The record of a flag of OpenRLHF's, over the versions from 0.6.0 to 0.11.2 and over its commands;
what it becomes.

Names and defaults are those of `openrlhf/cli/train_*.py` at each of its releases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from plimsoll.convert.openrlhf.version import FIRST, LAST, Version, parse_version
from plimsoll.convert.setting import Becomes, Read

COMMANDS = {
    "ppo": "train_ppo_ray",
    "local": "train_ppo",
    "sft": "train_sft",
    "rm": "train_rm",
    "dpo": "train_dpo",
    "kto": "train_kto",
    "kd": "train_kd",
    "prm": "train_prm",
}
"""By the names that the table has for them."""
DOTTED = (0, 10, 2)
"""The first version whose flags have dots."""
_UNTIL = {"local": (0, 6, 1), "kto": (0, 9, 5), "kd": (0, 9, 5), "prm": (0, 9, 5)}
"""The last version with a command."""

Default = Callable[[str, Version], object]


@dataclass(frozen=True)
class Flag:
    """One setting.

    flat: its name up to 0.10.1, None where it had none. dotted: its names from 0.10.2 on; a word
    `ppo:NAME` is of that command alone. of: the commands that have it, each with the versions
    where not all: `rm,kd@0.8.0`, `ppo@0.6.2-0.9.0`. read: how its words become a value. default:
    that of argparse. secret: its value is never shown.
    """

    flat: str | None
    dotted: str
    of: str
    read: Read
    becomes: Becomes
    default: Default = field(default=lambda command, version: None)
    secret: bool = False

    @property
    def id(self) -> str:
        """What the rules call it."""
        return self.flat or self.dotted.split()[0].rpartition(":")[2]

    def name(self, command: str, version: Version) -> str | None:
        """As that command spells it in that version, without dashes; None where it is not there."""
        if not any(since <= version <= until for since, until in self._spans(command)):
            return None
        if version < DOTTED:
            return self.flat
        names = [word.partition(":") for word in self.dotted.split()]
        own = {who: name for who, colon, name in names if colon}
        shared = [who for who, colon, _ in names if not colon]
        return own.get(command) or next(iter(shared), None)

    def _spans(self, command: str) -> Iterator[tuple[Version, Version]]:
        for word in self.of.split():
            who, _, when = word.partition("@")
            if command in who.split(","):
                since, _, until = when.partition("-")
                last = parse_version(until) if until else LAST
                yield (
                    parse_version(since) if since else FIRST,
                    min(last, _UNTIL.get(command, LAST)),
                )


def always(value: object) -> Default:
    """The same in every command and version."""
    return lambda command, version: value


def moved(value: object, *later: tuple[str, object]) -> Default:
    """Other values from these versions on."""
    steps = [(parse_version(since), other) for since, other in later]

    def default(command: str, version: Version) -> object:
        found = value
        for since, other in steps:
            found = other if version >= since else found
        return found

    return default


def each(otherwise: object = None, **commands: object) -> Default:
    """Of each command its own; a value, or what `moved` gives."""

    def default(command: str, version: Version) -> object:
        found = commands.get(command, otherwise)
        return found(command, version) if callable(found) else found

    return default
