"""Read the words of a command as its parser does, and find the version that has such flags."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from plimsoll.config.problems import Problem, invalid
from plimsoll.errors import ConfigError
from plimsoll.interop.convert.launch import Launch
from plimsoll.interop.convert.openrlhf.absent import REMOVED
from plimsoll.interop.convert.openrlhf.flag import (
    COMMANDS,
    FIRST,
    LAST,
    RELEASES,
    Version,
    VersionedFlag,
    format_version,
)
from plimsoll.interop.convert.openrlhf.table import FLAGS
from plimsoll.interop.convert.options import Assignment, Options, read_settings
from plimsoll.interop.convert.values import Setting, Typed, join_words, split_flags

_HIDDEN = "..."
_REFUSED = {
    "serve_rm": "It trains nothing. `plimsoll serve-reward CONFIG` serves a reward model",
    "batch_inference": "It trains nothing. `plimsoll sample CONFIG` samples and scores, `plimsoll "
    "eval` measures",
    "lora_combiner": "It trains nothing. `plimsoll merge ADAPTER --out FOLDER` merges an adapter",
    "interactive_chat": "It trains nothing. `vllm serve` or transformers chat with the model that "
    "a run leaves",
    "train_ppo": "It was removed in 0.6.2; its successor is train_ppo_ray",
    "train_prm": "It reads text in which a placeholder token stands after each step, and labels "
    "beside it; `plimsoll prm` reads lists: columns with the prompt, the steps and a label for "
    "each step. Convert the rows, and begin with the config in docs/rm.md",
}


@dataclass(frozen=True)
class Versions:
    """The first and the last version that have all flags of a command, or else the most."""

    first: Version
    last: Version


def command_of_program(program: str) -> str:
    """Return the table's name of a program such as `train_ppo_ray`.

    Raises:
        ConfigError: There is no such program, or it is not read.
    """
    for command, name in COMMANDS.items():
        if name == program:
            return command
    if program in _REFUSED:
        raise ConfigError(f"openrlhf.cli.{program} is not read. {_REFUSED[program]}.")
    close = difflib.get_close_matches(program, [*COMMANDS.values(), *_REFUSED], n=1)
    near = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"OpenRLHF has no program openrlhf.cli.{program}.{near} Read are: "
        f"{', '.join(COMMANDS.values())}."
    )


def read_options(
    launch: Launch, version: Version | None, cards: int | None
) -> tuple[Options, Versions]:
    """Return the settings of a command.

    Args:
        launch: The command.
        version: Version of OpenRLHF; None to find it by the flags.
        cards: Cards of a machine.

    Raises:
        ConfigError: Flags that the version has not, each with the nearest names, and values that
            cannot be read.
    """
    command = command_of_program(launch.program)
    typed, stray = split_flags(launch.arguments)
    versions = _find_versions(command, typed, version)
    flags = _flags(command, versions.last)
    o = read_settings(
        command,
        launch,
        {f"--{name}": _setting(flag, command, versions.last) for name, flag in flags.items()},
        list(_assignments(command, versions.last, typed)),
        "give another value, or leave the flag out",
        [*stray, *_unknown(command, typed, versions)],
    )
    options = replace(
        o,
        remarks=(),  # its parser, too, takes the last of repeated flags in silence
        cards=cards,
        version=versions.last,
        rl=command == "ppo",
        pairs=command in ("rm", "dpo"),
        has_critic=o["advantage_estimator"] == "gae",
    )
    return options, versions


def _setting(flag: VersionedFlag, command: str, version: Version) -> Setting:
    """Return what a flag is in one command and version."""
    value = flag.default(command, version)
    default = bool(value) if flag.reader.kind is bool else value
    return Setting(flag.id, (command,), flag.reader, lambda _: default, absent=flag.absent)


def _assignments(command: str, version: Version, typed: Sequence[Typed]) -> Iterator[Assignment]:
    for option in typed:
        flag, _ = _match(command, version, option.name)
        if flag is not None:
            name, words = f"--{option.name}", option.words
            text = join_words(name, [_HIDDEN] if flag.secret else words)
            yield Assignment(name, words, text, _setting(flag, command, version))


@cache
def _flags(command: str, version: Version) -> Mapping[str, VersionedFlag]:
    """Return the flags of a command in a version, by name."""
    return {name: flag for flag in FLAGS if (name := flag.name(command, version))}


@cache
def known_flags(command: str) -> tuple[VersionedFlag, ...]:
    """Return the flags that a command has in any version, in the table's order."""
    ids = {flag.id for version in RELEASES for flag in _flags(command, version).values()}
    return tuple(flag for flag in FLAGS if flag.id in ids)


def _match(command: str, version: Version, name: str) -> tuple[VersionedFlag | None, list[str]]:
    """Return the flag of a name, or of a beginning that only one has; and all that it may be."""
    flags = _flags(command, version)
    if name in flags:
        return flags[name], [name]
    begun = sorted(whole for whole in flags if name and whole.startswith(name))
    return (flags[begun[0]] if len(begun) == 1 else None), begun


def _unknown(command: str, typed: Sequence[Typed], versions: Versions) -> Iterator[Problem]:
    """Yield a problem for each flag that the version has not."""
    for option in typed:
        flag, possible = _match(command, versions.last, option.name)
        if flag is None:
            value = " ".join(map(shlex.quote, option.words)) or None
            why, fix = _explain_unknown(command, versions, option.name, possible)
            yield invalid(f"--{option.name}", value, why, fix)


def _explain_unknown(
    command: str, versions: Versions, name: str, possible: Sequence[str]
) -> tuple[str, str]:
    """Return why a name is no flag, and what to write instead."""
    flags = _flags(command, versions.last)
    close = difflib.get_close_matches(name, flags, n=3) or possible[:3]
    fix = f"did you mean {' or '.join(f'--{near}' for near in close)}?" if close else "leave it out"
    if possible:
        return f"It may be {' or '.join(f'--{whole}' for whole in possible[:4])}.", fix
    program = COMMANDS[command]
    exist = [v for v in RELEASES if _match(command, v, name)[0] is not None]
    if name in REMOVED and (not exist or exist[-1] < versions.last):
        since, successor = REMOVED[name]
        now = next((n for n, flag in flags.items() if flag.id == successor), successor)
        if not now:
            return f"It was removed in {since}, and has no successor.", "leave it out"
        return f"It was removed in {since}; its successor is --{now}.", f"write --{now}"
    if exist:
        what = f"{program} has it from {format_version(exist[0])} to {format_version(exist[-1])}"
        last = format_version(versions.last)
        if versions.first == versions.last:
            return f"{what}, and this is {last}.", fix
        between = f"{format_version(versions.first)} to {last}"
        return f"{what}, and the other flags are those of {between}.", fix
    also = [COMMANDS[c] for c in COMMANDS if any(name in _flags(c, v) for v in RELEASES)]
    releases = f"{format_version(FIRST)} to {format_version(LAST)}"
    why = f"No {program} of OpenRLHF {releases} has it"
    return (f"{why}; {' and '.join(also)} has." if also else f"{why}."), fix


def _find_versions(command: str, typed: Sequence[Typed], version: Version | None) -> Versions:
    """Return the versions that have the most of the flags, or the one that was given."""
    exist = [v for v in RELEASES if _flags(command, v)]
    if version is not None:
        if version not in exist:
            raise ConfigError(
                f"OpenRLHF {format_version(version)} has no {COMMANDS[command]}: it is in "
                f"{format_version(exist[0])} to {format_version(exist[-1])}."
            )
        return Versions(version, version)
    counts = {
        v: sum(_match(command, v, option.name)[0] is not None for option in typed) for v in exist
    }
    fitting = [v for v in exist if counts[v] == max(counts.values())]
    return Versions(fitting[0], fitting[-1])
