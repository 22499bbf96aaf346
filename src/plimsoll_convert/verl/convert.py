"""Convert a command of verl to a config.

The command's words are hydra overrides: `key=value`, `+key=value`, `++key=value`, `~key`.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence

from plimsoll.config.secrets import MASK, is_secret
from plimsoll.config.yaml_tree import read_value as read_yaml
from plimsoll.config.yaml_tree import write_value
from plimsoll.errors import ConfigError
from plimsoll_convert.launch import Launch
from plimsoll_convert.settings import (
    WORDS,
    Assignment,
    Keys,
    Options,
    Remark,
    Setting,
    by_name,
    join_words,
    read_settings,
    settings_of,
)
from plimsoll_convert.verl import find_command, learning, sections
from plimsoll_convert.verl.settings import FAMILIES, FSDP_SFT, SETTINGS
from plimsoll_convert.writer import Converted, write_config

_NOTHING = ("null", "None", "")
_CONFIG_FILES = ("--config-path", "--config-dir", "-cp", "-cd")
_CONFIG_NAMES = ("--config-name", "-cn")


def _read_options(launch: Launch, cards: int | None) -> Options:
    """Return the options of a command.

    Raises:
        ConfigError: The program cannot be converted, or values cannot be read.
    """
    command = find_command(launch.program)
    notes: list[Remark] = []
    overrides = dict(_overrides(launch.arguments, notes))
    is_old = launch.program == _OLD_PROGRAM
    listed = settings_of(SETTINGS, command, FSDP_SFT if is_old else None)
    known = by_name(listed)
    given = [_assignment(known, name, text) for name, text in overrides.items()]
    of_families = [g[0] for g in given if not isinstance(g, Remark) and g[1] not in known]
    unset = any("$" in text for text in overrides.values())
    remedy = "give another value, or leave it out"
    remedy += "; --set gives a variable of the script" if unset else ""
    settings = {setting.name: setting for setting in (*listed, *of_families)}
    return read_settings(
        command,
        launch,
        settings,
        given,
        remedy,
        notes=tuple(notes),
        cards=cards,
        rl=command == "ppo",
        critic_if="algorithm.adv_estimator",
        show_default=lambda name, value: f"{name}={write_value(value)}",
    )


def _overrides(words: Sequence[str], notes: list[Remark]) -> Iterator[tuple[str, str]]:
    """Yield (key, text of the value) for each override; add notes on words that are not read."""
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in _CONFIG_NAMES:
            yield _CONFIG_NAMES[0], value or next(rest, "")
        elif name in _CONFIG_FILES:
            why = "a config of your own is not read: give what it sets as overrides"
            notes.append(Remark("check", f"{name} {value or next(rest, '')}", why))
        elif word.startswith("~"):
            why = "what is taken away there has its default here"
            notes.append(Remark("check", shlex.quote(word), why))
        elif equals and name and not word.startswith("-"):
            yield name.lstrip("+"), value
        else:
            why = "it is no override KEY=VALUE"
            notes.append(Remark("unknown", join_words("", [word]).strip() or "''", why))


def _assignment(known: Mapping[str, Setting], name: str, value: str) -> Assignment | Remark:
    """Return the assignment of a key, which may be one of a family without a counterpart."""
    text = f"{name}={value}"
    if is_secret(name) or "env_vars" in text:
        text = f"{name}={MASK}"
    of_family = (Setting(name, (), WORDS, absent=r) for p, r in FAMILIES if name.startswith(p))
    setting = known.get(name) or next(of_family, None)
    if setting is not None:
        return setting, name, _words(value), text if text.isprintable() else repr(text)
    last = name.rpartition(".")[2]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    close += [key for key in known if key.rpartition(".")[2] == last]
    near = list(dict.fromkeys(close))[:2] or difflib.get_close_matches(name, known, n=1)
    why = "no such key is known, of verl 0.9.1 or of those before"
    why += f"; did you mean {' or '.join(near)}?" if near else ""
    return Remark("unknown", join_words("", [text]).strip(), why)


def _words(text: str) -> tuple[str, ...] | None:
    """Return the words of a value in hydra's grammar; None for null.

    Raises:
        ConfigError: The text begins like a list but is no list.
    """
    bare = text.strip()
    if bare in _NOTHING:
        return None
    if bare[0] == bare[-1] and bare[0] in "'\"" and len(bare) > 1:
        bare = bare[1:-1].strip()
    if bare.startswith("["):
        try:
            values = read_yaml(bare)
        except ConfigError as error:
            raise ConfigError(f"{text}: It must be a list, such as [a, b].") from error
        if isinstance(values, tuple):
            return tuple(v if isinstance(v, str) else write_value(v) for v in values)
    return (bare,)


_VERSION = "0.9.1"
_OLD_PROGRAM = "fsdp_sft_trainer"
_OLD_NOTE = (
    "The program is older than verl 0.9.1: its own defaults are taken. Its later versions have "
    "gradient checkpointing on."
)


def convert(launch: Launch, cards: int | None = None) -> Converted:
    """Return a config that has the same meaning as a verl command.

    Args:
        launch: The command.
        cards: Number of cards per machine, if the command does not say it.

    Raises:
        ConfigError: Values cannot be read, Plimsoll cannot do what they say, or the config is
            wrong.
        SettingsConflict: Settings cannot work together.
    """
    o = _read_options(launch, cards)
    rollout, reward_model = sections.rollout(o), learning.reward_model(o)
    run: Keys = {
        "cluster": sections.machines(o, has_reward_model=reward_model is not None),
        "actor": sections.actor(o),
        "critic": sections.critic(o),
        "reference": sections.reference(o),
        "reward_model": reward_model,
        "rewards": learning.rewards(o),
        "data": sections.data(o),
        "batch": sections.batch(o),
        "rollout": rollout,
        "eval_sampling": sections.eval_sampling(o) if o.rl else None,
        "algorithm": learning.algorithm(o),
        "run": sections.run(o),
    }
    is_old = launch.program == _OLD_PROGRAM
    about = f"verl {'before ' if is_old else ''}{_VERSION}, {launch.program}"
    note = _OLD_NOTE if is_old else ""
    return write_config(learning.job(o), run, o, about, note)
