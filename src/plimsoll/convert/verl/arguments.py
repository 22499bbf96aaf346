"""Hydra's overrides to what they say: `key=value`, `+key=value`, `++key=value`, `~key`."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from plimsoll.config.problems import invalid, refuse
from plimsoll.config.yaml_tree import read_value as read_yaml
from plimsoll.config.yaml_tree import write_value
from plimsoll.convert.launch import Launch
from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark
from plimsoll.convert.setting import Setting, value_of
from plimsoll.convert.typed import Typed, shown_words
from plimsoll.convert.verl.programs import command_named
from plimsoll.convert.verl.settings import FAMILIES, SETTINGS
from plimsoll.errors import ConfigError

_NOTHING = ("null", "None", "")
_UNREAD = ("--config-path", "--config-dir", "-cp", "-cd")


@cache
def settings_of(command: str) -> tuple[Setting, ...]:
    return tuple(one for one in SETTINGS if command in one.of)


@cache
def _named(command: str) -> Mapping[str, Setting]:
    return {name: one for one in settings_of(command) for name in (one.name, *one.older)}


def read_options(
    launch: Launch, cards: int | None
) -> tuple[Options, tuple[Setting, ...], list[Outcome]]:
    """A command's options, the settings that it has, and what is told of keys that are not known.

    Raises ConfigError for a program that is not read, and for values that cannot be read.
    """
    command = command_named(launch.program)
    notes: list[Outcome] = []
    overrides = {one.name: one for one in _overrides(launch.arguments, notes)}
    values: dict[str, object] = {s.id: s.default(command) for s in settings_of(command)}
    shown: dict[str, str] = {}
    further: list[Setting] = []
    problems = []
    for one in overrides.values():
        setting = _setting(command, one.name)
        text = f"{one.name}={one.words[0]}"
        if setting is None:
            notes.append(_unknown(command, one))
            continue
        if setting.id in shown:
            notes.append(Remark("idle", shown[setting.id], f"{one.name} is the same, and counts"))
        if setting.id not in values:
            further.append(setting)
        shown[setting.id] = text if text.isprintable() else repr(text)
        try:
            values[setting.id] = _read(command, setting, one.words[0])
        except ValueError as error:
            fix = "give another value, or leave it out"
            fix += "; one of the script's variables is given by --set" if "$" in text else ""
            problems.append(invalid(one.name, one.words[0] or None, str(error), fix))
    refuse(problems)
    settings = (*settings_of(command), *further)
    rl = command == "ppo"
    options = Options(
        command,
        launch,
        values,
        shown,
        {one.id: one.name for one in settings},
        cards,
        rl=rl,
        has_critic=rl and values["algorithm.adv_estimator"] == "gae",
        default=as_override,
    )
    return options, settings, notes


def as_override(name: str, value: object) -> str:
    """A default, as an override says it."""
    return f"{name}={write_value(value)}"


def _overrides(words: Sequence[str], notes: list[Outcome]) -> Iterator[Typed]:
    """Each with its value as it was written."""
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in _UNREAD or name in ("--config-name", "-cn"):
            value = value or next(rest, "")
            if name in _UNREAD:
                why = "a config of one's own is not read: give what it sets as overrides"
                notes.append(Remark("check", f"{name} {value}", why))
            else:
                yield Typed("--config-name", (value,))
        elif word.startswith("~"):
            why = "what is taken away there has its default here"
            notes.append(Remark("check", shlex.quote(word), why))
        elif equals and name and not word.startswith("-"):
            yield Typed(name.lstrip("+"), (value,))
        else:
            why = "it is no override KEY=VALUE"
            notes.append(Remark("unknown", shown_words("", [word]).strip() or "''", why))


def _setting(command: str, name: str) -> Setting | None:
    """That of a name; or of a family of names one that is like its others."""
    known = _named(command).get(name)
    if known is not None:
        return known
    for family in FAMILIES:
        if command in family.of and any(name.startswith(p) for p in (family.name, *family.older)):
            return replace(family, name=name, older=())
    return None


def _unknown(command: str, one: Typed) -> Outcome:
    """With the nearest names: by all of it, or by its last part."""
    known = _named(command)
    last = one.name.rpartition(".")[2]
    close = difflib.get_close_matches(one.name, known, n=1, cutoff=0.8)
    close += [name for name in known if name.rpartition(".")[2] == last]
    near = list(dict.fromkeys(close))[:2] or difflib.get_close_matches(one.name, known, n=1)
    why = "no such key is known, of verl 0.9.1's or of those before"
    why += f"; did you mean {' or '.join(near)}?" if near else ""
    return Remark("unknown", shown_words("", [f"{one.name}={one.words[0]}"]).strip(), why)


def _read(command: str, setting: Setting, text: str) -> object:
    words = _words(text)
    most = setting.read.most
    if words is not None and most is not None and len(words) > most:
        raise ValueError("It must be one value, not a list.")
    return value_of(setting, command, words)


def _words(text: str) -> list[str] | None:
    """Of a value in hydra's grammar; None of null."""
    bare = text.strip()
    if bare in _NOTHING:
        return None
    if bare[0] == bare[-1] and bare[0] in "'\"" and len(bare) > 1:
        bare = bare[1:-1].strip()
    if bare.startswith("["):
        try:
            held = read_yaml(bare)
        except ConfigError as error:
            raise ValueError("It must be a list, such as [a, b].") from error
        if isinstance(held, tuple):
            return [one if isinstance(one, str) else write_value(one) for one in held]
    return [bare]
