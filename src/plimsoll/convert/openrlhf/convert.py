"""A command of OpenRLHF's to a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from plimsoll.config.yaml_tree import write_value
from plimsoll.convert.apply import config_of
from plimsoll.convert.launch import Launch
from plimsoll.convert.openrlhf import algorithm, roles, rows
from plimsoll.convert.openrlhf.arguments import Told, known_flags, read_options
from plimsoll.convert.openrlhf.flag import COMMANDS
from plimsoll.convert.openrlhf.version import Version, written
from plimsoll.convert.options import Options
from plimsoll.convert.result import Converted, differences
from plimsoll.convert.setting import Rule
from plimsoll.errors import ConfigError, PlimsollError

_JOBS: Mapping[str, Callable[[Options], str]] = {
    **dict.fromkeys(("ppo", "local"), algorithm.command_of),
    **{name: (lambda o: o.command) for name in ("sft", "rm", "dpo", "kto")},
    "kd": lambda o: "distill",
}
_ALWAYS: tuple[Rule, ...] = (roles.ranks, rows.columns)
"""Rules that no flag leads to."""
_PRM = (
    "train_prm reads text in which a placeholder token stands after each step, and labels beside "
    "it; `plimsoll prm` reads lists: columns with the prompt, the steps and a label for each step. "
    "Convert the rows, and begin with the config in docs/rm.md."
)


def convert(launch: Launch, version: Version | None = None, cards: int | None = None) -> Converted:
    """The config that means what a command means. version: None to have it told from the flags.
    cards: of a machine, where the command does not say it.

    Raises ConfigError for flags that cannot be read, and for what cannot be done here; and as a
    job does that is given such a config.
    """
    options, told = read_options(launch, version, cards)
    found = _converted(options, told)
    if told.first == told.last:
        return found
    which = f"The flags are those of {written(told.first)} to {written(told.last)}."
    return replace(found, told=f"{which} {_moved(found, launch, told.first, cards)}")


def _moved(found: Converted, launch: Launch, version: Version, cards: int | None) -> str:
    """What the first of the versions that it may be makes of it."""
    try:
        first = _converted(*read_options(launch, version, cards))
    except PlimsollError:
        return f"As one of {written(version)} it is refused: --version says which it is."
    other = [f"{k}: {write_value(v)}" for k, v in differences(found, first).items()]
    if not other:
        return "They mean the same in all of them."
    return f"--version {written(version)} would mean {', '.join(other)}."


def _converted(options: Options, told: Told) -> Converted:
    if options.command not in _JOBS:
        raise ConfigError(_PRM)
    if options["pretrain"] is None:
        raise ConfigError(f"{options.names['pretrain']} is needed: the model to train.")
    about = f"OpenRLHF {written(told.last)}, {COMMANDS[options.command]}"
    job = _JOBS[options.command](options)
    return config_of(job, options, known_flags(options.command), _ALWAYS, about)
