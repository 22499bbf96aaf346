"""A command of verl's to a config."""

from __future__ import annotations

from plimsoll.convert.apply import config_of
from plimsoll.convert.launch import Launch
from plimsoll.convert.result import Converted
from plimsoll.convert.setting import Rule
from plimsoll.convert.verl import algorithm, roles
from plimsoll.convert.verl.arguments import read_options

VERSION = "0.9.1"
_ALWAYS: tuple[Rule, ...] = (roles.ranks,)


def convert(launch: Launch, cards: int | None = None) -> Converted:
    """The config that means what a command means. cards: of a machine, where the command does not
    say it.

    Raises ConfigError for values that cannot be read, and for what cannot be done here; and as a
    job does that is given such a config.
    """
    options, settings, notes = read_options(launch, cards)
    about = f"verl {VERSION}, {launch.program}"
    job = algorithm.command_of(options) if options.rl else "sft"
    return config_of(job, options, settings, _ALWAYS, about, notes)
