"""A command of TRL's to a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plimsoll.convert.apply import config_of
from plimsoll.convert.launch import Launch
from plimsoll.convert.options import Options
from plimsoll.convert.result import Converted
from plimsoll.convert.setting import Rule
from plimsoll.convert.trl import algorithm, roles
from plimsoll.convert.trl.arguments import read_options, settings_of
from plimsoll.errors import ConfigError

VERSION = "1.16"
_JOBS: Mapping[str, Callable[[Options], str]] = {
    **{name: (lambda o: o.command) for name in ("sft", "dpo", "kto")},
    "reward": lambda o: "rm",
    **dict.fromkeys(("grpo", "rloo"), algorithm.command_of),
    **dict.fromkeys(("orpo", "cpo"), lambda o: "dpo"),
    "gkd": lambda o: "distill",
}
_ALWAYS: tuple[Rule, ...] = (roles.ranks,)


def convert(launch: Launch, cards: int | None = None) -> Converted:
    """The config that means what a command means. cards: of a machine, where the command does not
    say it.

    Raises ConfigError for values and files that cannot be read, and for what cannot be done here;
    and as a job does that is given such a config.
    """
    options, notes = read_options(launch, cards)
    if options["model_name_or_path"] is None:
        raise ConfigError("--model_name_or_path is needed: the model to train.")
    about = f"TRL {VERSION}, trl {options.command}"
    settings = settings_of(options.command)
    job = _JOBS[options.command](options)
    return config_of(job, options, settings, _ALWAYS, about, notes)
