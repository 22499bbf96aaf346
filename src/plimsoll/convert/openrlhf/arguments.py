"""Words of a command line to what they say, as argparse reads them; and which version has such
flags."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from plimsoll.config.problems import Problem, invalid, refuse
from plimsoll.convert.launch import Launch
from plimsoll.convert.openrlhf.flag import COMMANDS, Flag
from plimsoll.convert.openrlhf.flags_common import COMMON
from plimsoll.convert.openrlhf.flags_jobs import JOBS
from plimsoll.convert.openrlhf.version import LAST, RELEASES, Version, written
from plimsoll.convert.options import Options
from plimsoll.convert.setting import read_value
from plimsoll.convert.typed import Typed, shown_words, split_flags
from plimsoll.errors import ConfigError

FLAGS: tuple[Flag, ...] = (*COMMON, *JOBS)
_HIDDEN = "..."
_OF_RL = ("ppo", "local")
_OF_PAIRS = ("rm", "dpo")
_ELSEWHERE = {
    "serve_rm": "`plimsoll serve-reward CONFIG` serves a reward model",
    "batch_inference": "`plimsoll sample CONFIG` samples and scores, `plimsoll eval` measures",
    "lora_combiner": "`plimsoll merge ADAPTER --out DIRECTORY` merges an adapter",
    "interactive_chat": "`vllm serve` or transformers chat with the model that a run leaves",
}


@dataclass(frozen=True)
class Told:
    """How the version was told. first, last: the versions that have all of the flags, or else the
    most."""

    first: Version
    last: Version


def command_named(program: str) -> str:
    """The table's name of `train_ppo_ray`. Raises ConfigError for what trains nothing."""
    for name, known in COMMANDS.items():
        if known == program:
            return name
    if program in _ELSEWHERE:
        raise ConfigError(f"openrlhf.cli.{program} trains nothing. {_ELSEWHERE[program]}.")
    close = difflib.get_close_matches(program, [*COMMANDS.values(), *_ELSEWHERE], n=1)
    near = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"OpenRLHF has no program openrlhf.cli.{program}.{near} Read are: "
        f"{', '.join(COMMANDS.values())}."
    )


def read_options(
    launch: Launch, version: Version | None, cards: int | None
) -> tuple[Options, Told]:
    """A command's options. version: None to have it told from the flags. cards: of a machine.

    Raises ConfigError that names every flag that the version has not, with the nearest names, and
    every value that cannot be read.
    """
    command = command_named(launch.program)
    typed, stray = split_flags(launch.arguments)
    told = _told(command, typed, version)
    flags = _flags(command, told.last)
    problems = [*stray, *_unknown(command, typed, told)]
    values, shown = _values(command, told.last, typed, problems)
    refuse(problems)
    names = {flag.id: f"--{name}" for name, flag in flags.items()}
    rl = command in _OF_RL
    options = Options(
        command,
        launch,
        values,
        shown,
        names,
        cards,
        version=told.last,
        rl=rl,
        pairs=command in _OF_PAIRS,
        has_critic=rl and values.get("advantage_estimator") == "gae",
    )
    return options, told


@cache
def _flags(command: str, version: Version) -> Mapping[str, Flag]:
    """Those that a command has in a version, by its names for them."""
    return {name: flag for flag in FLAGS if (name := flag.name(command, version))}


@cache
def known_flags(command: str) -> tuple[Flag, ...]:
    """Those that a command has in any version, in the table's order."""
    ids = {flag.id for v in RELEASES for flag in _flags(command, v).values()}
    return tuple(flag for flag in FLAGS if flag.id in ids)


def _named(command: str, version: Version, name: str) -> tuple[Flag | None, list[str]]:
    """The flag of a name, or of a beginning that only one has; and what it may be."""
    flags = _flags(command, version)
    if name in flags:
        return flags[name], [name]
    begun = sorted(whole for whole in flags if name and whole.startswith(name))
    return (flags[begun[0]] if len(begun) == 1 else None), begun


def _unknown(command: str, typed: Sequence[Typed], told: Told) -> Iterator[Problem]:
    """Flags that the version has not."""
    for one in typed:
        flag, possible = _named(command, told.last, one.name)
        if flag is None:
            value = " ".join(map(shlex.quote, one.words)) or None
            yield invalid(f"--{one.name}", value, *_meant(command, told, one.name, possible))


def _meant(command: str, told: Told, name: str, possible: Sequence[str]) -> tuple[str, str]:
    """Why a name is none, and what to write instead."""
    flags = _flags(command, told.last)
    close = difflib.get_close_matches(name, flags, n=3) or possible[:3]
    fix = f"did you mean {' or '.join(f'--{one}' for one in close)}?" if close else "leave it out"
    if possible:
        return f"It may be {' or '.join(f'--{one}' for one in possible[:4])}.", fix
    exist = [v for v in RELEASES if _named(command, v, name)[0] is not None]
    if exist:
        what = f"{COMMANDS[command]} has it from {written(exist[0])} to {written(exist[-1])}"
        others = f"{written(told.first)} to {written(told.last)}"
        if told.first == told.last:
            return f"{what}, and this is {written(told.last)}.", fix
        return f"{what}, and the other flags are those of {others}.", fix
    also = [COMMANDS[c] for c in COMMANDS if any(name in _flags(c, v) for v in RELEASES)]
    why = f"No {COMMANDS[command]} of OpenRLHF {written(RELEASES[0])} to {written(LAST)} has it"
    return (f"{why}; {' and '.join(also)} has." if also else f"{why}."), fix


def _told(command: str, typed: Sequence[Typed], version: Version | None) -> Told:
    """The versions that have the most of the flags; of these the last."""
    exist = [v for v in RELEASES if _flags(command, v)]
    if version is not None:
        if version not in exist:
            raise ConfigError(
                f"OpenRLHF {written(version)} has no {COMMANDS[command]}: it is in "
                f"{written(exist[0])} to {written(exist[-1])}."
            )
        return Told(version, version)
    counts = {v: sum(_named(command, v, one.name)[0] is not None for one in typed) for v in exist}
    fitting = [v for v in exist if counts[v] == max(counts.values())]
    return Told(fitting[0], fitting[-1])


def _values(
    command: str, version: Version, typed: Sequence[Typed], problems: list[Problem]
) -> tuple[dict[str, object], dict[str, str]]:
    """Of every flag of the version; and how those that were given were typed."""
    values = {f.id: _default(f, command, version) for f in _flags(command, version).values()}
    shown: dict[str, str] = {}
    for one in typed:
        flag, _ = _named(command, version, one.name)
        if flag is None:
            continue
        words = list(one.words)
        taken = words if flag.read.most is None else words[: flag.read.most]
        for word in words[len(taken) :]:
            why = f"--{one.name} takes no more words."
            problems.append(invalid(shlex.quote(word), None, why, "leave it out, or quote it"))
        try:
            values[flag.id] = read_value(flag.read, taken)
        except ValueError as error:
            given = " ".join(map(shlex.quote, taken)) or None
            fix = "give another value, or leave the flag out"
            problems.append(invalid(f"--{one.name}", given, str(error), fix))
        shown[flag.id] = shown_words(f"--{one.name}", [_HIDDEN] if flag.secret else taken)
    return values, shown


def _default(flag: Flag, command: str, version: Version) -> object:
    value = flag.default(command, version)
    return bool(value) if flag.read.kind is bool else value
