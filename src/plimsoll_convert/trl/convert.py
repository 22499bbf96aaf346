"""Convert a command of TRL to a config.

The command line, TRL's YAML file, and the config files of accelerate and DeepSpeed are read.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from plimsoll.config.problems import refuse
from plimsoll.config.yaml_tree import read_tree
from plimsoll.errors import ConfigError
from plimsoll_convert.launch import Launch
from plimsoll_convert.settings import (
    Assignment,
    Keys,
    Options,
    Remark,
    Setting,
    Typed,
    by_name,
    join_words,
    read_settings,
    settings_of,
    split_flags,
)
from plimsoll_convert.trl import COMMANDS, find_command, learning, sections
from plimsoll_convert.trl.settings import OLD_DEFAULTS, OLD_NAMES, SETTINGS
from plimsoll_convert.writer import Converted, write_config

_NULLS = (("None",), ("null",))
_CONFIGS: Mapping[str, Mapping[str, object]] = {
    "single_gpu": {"num_processes": 1},
    "multi_gpu": {"num_processes": 8},
    **{f"zero{n}": {"zero_stage": n, "num_processes": 8} for n in (1, 2, 3)},
    **{f"fsdp{n}": {"use_fsdp": True, "num_processes": 8} for n in (1, 2)},
}
"""Settings of TRL's own accelerate configs, by the files' names without `deepspeed_`."""
_ACCELERATE = ("num_processes", "num_machines", "zero_stage", "mixed_precision")
_DEEPSPEED = ("zero_stage", "offload_optimizer_device", "offload_param_device")


@cache
def _known(command: str) -> Mapping[str, Setting]:
    return by_name(settings_of(SETTINGS, command))


def _read_options(launch: Launch, cards: int | None) -> Options:
    """Return the options of a command.

    Raises:
        ConfigError: The program cannot be converted, or a file or a value cannot be read.
    """
    command = find_command(launch.program)
    words = launch.launcher
    at = next((i for i, word in enumerate(words) if os.path.basename(word) == "accelerate"), None)
    of_accelerate = () if at is None else words[at + 2 :]
    flags = [word for word in of_accelerate if word not in ("-m", "python")]
    typed, problems = split_flags([*flags, *launch.arguments])
    refuse(problems)
    given = {name.replace("-", "_"): words for name, words in typed}
    notes: list[Remark] = []
    options = {**dict(_files(given, notes)), **given}
    old = command == "grpo" and any(name in options for name in OLD_NAMES)
    listed = settings_of(SETTINGS, command, OLD_DEFAULTS if old else None)
    return read_settings(
        command,
        launch,
        {f"--{setting.name}": setting for setting in listed},
        [_assignment(command, name, words) for name, words in options.items()],
        "give another value, or leave the flag out",
        notes=tuple(notes),
        cards=cards,
        rl=command in ("grpo", "rloo"),
        pairs=command in ("dpo", "reward", "orpo", "cpo"),
    )


def _assignment(command: str, given: str, words: tuple[str, ...]) -> Assignment | Remark:
    """Return the assignment of an option: its name may be `no_NAME`, or a unique prefix."""
    known, name = _known(command), f"--{given}"
    text = join_words(name, words)
    value = None if words[:1] in _NULLS else words
    if given in known:
        return known[given], name, value, text
    switch = known.get(given.removeprefix("no_"))
    if switch is not None and (switch.reader.kind is bool or switch.absent is not None):
        return switch, name, ("false",), text
    begun = {s.id: s for full, s in known.items() if full.startswith(given or " ")}
    if len(begun) == 1:
        return next(iter(begun.values())), name, value, text
    why = f"trl {command} of TRL 1.16 has no such setting"
    if others := [c for c in COMMANDS if given in _known(c)]:
        return Remark("unknown", text, f"{why}; trl {' and '.join(others)} has")
    close = difflib.get_close_matches(name, [f"--{full}" for full in known], n=2)
    near = f"; did you mean {' or '.join(close)}?" if close else ""
    return Remark("unknown", text, why + near)


def _files(given: Mapping[str, tuple[str, ...]], notes: list[Remark]) -> Iterator[Typed]:
    """Yield the settings in the files of accelerate, TRL and DeepSpeed that flags name."""
    flags = {name: words[0] for name, words in given.items() if words}
    for flag in ("config_file", "accelerate_config"):
        if flag in flags:
            yield from _accelerate(flag, flags[flag], notes)
    of_trl = [*_config(flags["config"], notes)] if "config" in flags else []
    yield from of_trl
    flags = {name: words[0] for name, words in of_trl if words} | flags
    if "deepspeed" in flags:
        yield from _deepspeed(flags["deepspeed"], notes)


def _config(path: str, notes: list[Remark]) -> Iterator[Typed]:
    for name, value in _mapping(path).items():
        if name == "env":
            why = "variables of the environment are set before `plimsoll` is called"
            notes.append(Remark("check", f"env of {path}", why))
        else:
            yield _as_typed(name.replace("-", "_"), value)


def _as_typed(name: str, value: object) -> Typed:
    plain = isinstance(value, tuple) and not any(isinstance(v, dict | tuple) for v in value)
    values = value if plain and isinstance(value, tuple) else (value,)
    texts = ("None" if v is None else v if isinstance(v, str) else json.dumps(v) for v in values)
    return name, tuple(texts)


def _mapping(path: str) -> Mapping[str, object]:
    """Return the mapping in a YAML or JSON file; raise ConfigError if it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {why}. The command names it.") from error
    return read_tree(text, path).values


def _accelerate(flag: str, path: str, notes: list[Remark]) -> Iterator[Typed]:
    """Yield the settings in a config of accelerate that can be converted."""
    name = os.path.basename(path).partition(".")[0].removeprefix("deepspeed_")
    values: dict[str, object] = {}
    if Path(path).is_file():
        config = _mapping(path)
        values = {n: config[n] for n in _ACCELERATE if n in config}
        if str(config.get("distributed_type", "")).upper() == "FSDP":
            values["use_fsdp"] = True
        for section in (config.get("deepspeed_config"), config.get("fsdp_config")):
            if isinstance(section, dict):
                values |= {n: section[n] for n in _DEEPSPEED if n in section}
                if str(section.get("fsdp_offload_params", "")).lower() == "true":
                    values["fsdp_offload_params"] = True
    elif name in _CONFIGS:
        values = dict(_CONFIGS[name])
        why = f"the file is not here: taken as TRL's own {name}.yaml, of 8 processes"
        notes.append(Remark("check", f"--{flag} {path}", why))
    else:
        why = "the file is not here: its processes, ZeRO stage and offload are not known"
        notes.append(Remark("check", f"--{flag} {path}", why))
    yield from (_as_typed(key, value) for key, value in values.items())


def _deepspeed(path: str, notes: list[Remark]) -> Iterator[Typed]:
    """Yield the settings in a config of DeepSpeed that can be converted."""
    if not Path(path).is_file():
        why = "the file is not here: its ZeRO stage and offload are not known"
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


_VERSION = "1.16"
_OLD_NOTE = (
    "is of TRL before 1.0 (0.14 to 0.16): the defaults of that time are taken, but for top_k 50, "
    "which the policy's ratio does not allow. 0.16 takes the mean over all tokens (loss_type bnpo)."
)


def convert(launch: Launch, cards: int | None = None) -> Converted:
    """Return a config that has the same meaning as a TRL command.

    Args:
        launch: The command.
        cards: Number of cards per machine, if the command does not say it.

    Raises:
        ConfigError: Values or files cannot be read, Plimsoll cannot do what they say, or the config
            is wrong.
        SettingsConflict: Settings cannot work together.
    """
    o = _read_options(launch, cards)
    run: Keys = {
        "cluster": sections.machines(o),
        "actor": sections.actor(o),
        "reference": sections.reference(o),
        "teacher": learning.teacher(o),
        "reward_model": learning.reward_model(o),
        "rewards": learning.rewards(o),
        "data": sections.data(o),
        "batch": sections.batch(o),
        "rollout": sections.rollout(o),
        "eval_sampling": {} if o["eval_strategy"] != "no" else None,
        "algorithm": learning.algorithm(o),
        "run": sections.run(o),
    }
    old = o.given(*OLD_NAMES)
    about = f"TRL {'before 1.0' if old else _VERSION}, trl {o.command}"
    note = f"--{old[0]} {_OLD_NOTE}" if old else ""
    return write_config(learning.job(o), run, o, about, note)
