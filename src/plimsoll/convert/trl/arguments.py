"""Words of a command line, TRL's YAML, and accelerate's, to what they say."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from plimsoll.config.problems import invalid, refuse
from plimsoll.config.yaml_tree import read_tree
from plimsoll.convert.launch import Launch
from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark
from plimsoll.convert.setting import Setting, value_of
from plimsoll.convert.trl.programs import COMMANDS, command_named
from plimsoll.convert.trl.settings import SETTINGS
from plimsoll.convert.typed import Typed, shown_words, split_flags
from plimsoll.errors import ConfigError

_NOTHING = ("None", "null")
_CONFIGS: Mapping[str, Mapping[str, object]] = {
    "single_gpu": {"num_processes": 1},
    "multi_gpu": {"num_processes": 8},
    **{f"zero{n}": {"zero_stage": n, "num_processes": 8} for n in (1, 2, 3)},
    **{f"fsdp{n}": {"use_fsdp": True, "num_processes": 8} for n in (1, 2)},
}
"""What TRL's own files for accelerate say, by their names without `deepspeed_`."""
_ACCELERATE = ("num_processes", "num_machines", "zero_stage", "mixed_precision")
_DEEPSPEED = ("zero_stage", "offload_optimizer_device", "offload_param_device")


@cache
def settings_of(command: str) -> tuple[Setting, ...]:
    return tuple(one for one in SETTINGS if command in one.of)


@cache
def _named(command: str) -> Mapping[str, Setting]:
    return {name: one for one in settings_of(command) for name in (one.name, *one.older)}


def read_options(launch: Launch, cards: int | None) -> tuple[Options, list[Outcome]]:
    """A command's options, and what is told of those that TRL has not.

    Raises ConfigError for a program that is not read, a file that cannot be, and values that cannot
    be read.
    """
    command = command_named(launch.program)
    typed, problems = split_flags([*_of_accelerate(launch), *launch.arguments])
    given = [Typed(one.name.replace("-", "_"), one.words) for one in typed]
    notes: list[Outcome] = []
    whole = {one.name: one for one in [*_files(command, given, notes), *given]}
    values: dict[str, object] = {s.id: s.default(command) for s in settings_of(command)}
    shown: dict[str, str] = {}
    for one in whole.values():
        setting, value = _setting(command, one)
        if setting is None:
            notes.append(_unknown(command, one))
            continue
        if setting.id in shown:
            notes.append(Remark("idle", shown[setting.id], f"--{one.name} is the same, and counts"))
        shown[setting.id] = shown_words(f"--{one.name}", ["..."] if setting.secret else one.words)
        if value is not None:
            values[setting.id] = value
            continue
        try:
            values[setting.id] = _read(command, setting, one.words)
        except ValueError as error:
            fix = "give another value, or leave the flag out"
            text = " ".join(one.words) or None
            problems.append(invalid(f"--{one.name}", text, str(error), fix))
    refuse(problems)
    names = {s.id: f"--{s.name}" for s in settings_of(command)}
    rl = command in ("grpo", "rloo")
    pairs = command in ("dpo", "reward", "orpo", "cpo")
    options = Options(command, launch, values, shown, names, cards, rl=rl, pairs=pairs)
    return options, notes


def _of_accelerate(launch: Launch) -> Sequence[str]:
    """The flags of `accelerate launch`."""
    words = launch.launcher
    at = next((i for i, word in enumerate(words) if os.path.basename(word) == "accelerate"), None)
    return () if at is None else [word for word in words[at + 2 :] if word not in ("-m", "python")]


def _setting(command: str, one: Typed) -> tuple[Setting | None, object]:
    """The setting of a name, or of a beginning that only one has; and False of `no_NAME`."""
    known = _named(command)
    if one.name in known:
        return known[one.name], None
    off = known.get(one.name.removeprefix("no_"))
    if off is not None and off.read.kind is bool:
        return off, False
    begun = {s.id: s for name, s in known.items() if one.name and name.startswith(one.name)}
    return (next(iter(begun.values())) if len(begun) == 1 else None), None


def _unknown(command: str, one: Typed) -> Outcome:
    others = [c for c in COMMANDS if one.name in _named(c)]
    close = difflib.get_close_matches(one.name, _named(command), n=2)
    why = f"trl {command} of TRL 1.16 has no such setting"
    if others:
        why += f"; trl {' and '.join(others)} has"
    elif close:
        why += f"; did you mean {' or '.join(f'--{name}' for name in close)}?"
    return Remark("unknown", shown_words(f"--{one.name}", one.words), why)


def _read(command: str, setting: Setting, words: Sequence[str]) -> object:
    if len(words) == 1 and words[0] in _NOTHING:
        return value_of(setting, command, None)
    most = setting.read.most
    if most is not None and len(words) > most:
        raise ValueError(f"It takes {most or 'no'} word{'s' if most > 1 else ''}: quote the value.")
    return value_of(setting, command, list(words))


def _files(command: str, given: Sequence[Typed], notes: list[Outcome]) -> Iterator[Typed]:
    """What the files say that flags name: of accelerate, of DeepSpeed, and TRL's own."""
    flags = {one.name: one.words[0] for one in given if one.words}
    for flag in ("config_file", "accelerate_config"):
        if flag in flags:
            yield from _accelerate(flag, flags[flag], notes)
    own = [*_config(flags["config"], notes)] if "config" in flags else []
    yield from own
    deepspeed = {one.name: one.words[0] for one in [*own, *given] if one.words}.get("deepspeed")
    if deepspeed is not None:
        yield from _deepspeed(deepspeed, notes)


def _config(path: str, notes: list[Outcome]) -> Iterator[Typed]:
    for name, value in _mapping(path).items():
        if name == "env":
            why = "variables of the environment are set before `plimsoll` is called"
            notes.append(Remark("check", f"env of {path}", why))
        else:
            yield _as_typed(name.replace("-", "_"), value)


def _as_typed(name: str, value: object) -> Typed:
    many = isinstance(value, tuple) and not any(isinstance(one, dict | tuple) for one in value)
    values = value if many and isinstance(value, tuple) else (value,)
    return Typed(name, tuple(map(_word, values)))


def _word(value: object) -> str:
    if isinstance(value, str):
        return value
    return "None" if value is None else json.dumps(value)


def _mapping(path: str) -> Mapping[str, object]:
    """What a file of YAML or JSON holds."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {why}. It is named by the command.") from error
    return read_tree(text, path).values


def _accelerate(flag: str, path: str, notes: list[Outcome]) -> Iterator[Typed]:
    """What matters here of a config of accelerate's."""
    name = os.path.basename(path).partition(".")[0].removeprefix("deepspeed_")
    if Path(path).is_file():
        held = _mapping(path)
        sections = [held.get("deepspeed_config"), held.get("fsdp_config")]
        values = {n: held[n] for n in _ACCELERATE if n in held}
        if str(held.get("distributed_type", "")).upper() == "FSDP":
            values["use_fsdp"] = True
        for section in sections:
            if isinstance(section, dict):
                values |= {n: section[n] for n in _DEEPSPEED if n in section}
                if str(section.get("fsdp_offload_params", "")).lower() == "true":
                    values["fsdp_offload_params"] = True
    elif name in _CONFIGS:
        values = dict(_CONFIGS[name])
        why = f"it is not there to be read: taken as TRL's own {name}.yaml, of 8 processes"
        notes.append(Remark("check", f"--{flag} {path}", why))
    else:
        why = "it is not there to be read: processes, ZeRO stage and offload are not known by it"
        notes.append(Remark("check", f"--{flag} {path}", why))
        return
    for one, value in values.items():
        yield _as_typed(one, value)


def _deepspeed(path: str, notes: list[Outcome]) -> Iterator[Typed]:
    """What matters here of a config of DeepSpeed's."""
    if not Path(path).is_file():
        why = "it is not there to be read: ZeRO stage and offload are not known by it"
        notes.append(Remark("check", f"--deepspeed {path}", why))
        return
    zero = _mapping(path).get("zero_optimization")
    if not isinstance(zero, dict):
        return
    yield _as_typed("zero_stage", zero.get("stage", 0))
    for name in ("optimizer", "param"):
        offload = zero.get(f"offload_{name}")
        if isinstance(offload, dict) and "device" in offload:
            yield _as_typed(f"offload_{name}_device", offload["device"])
