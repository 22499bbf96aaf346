"""A command of OpenRLHF's to a config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from plimsoll.config.problems import Problem, invalid, refuse
from plimsoll.config.yaml_tree import write_value
from plimsoll.convert.launch import Launch
from plimsoll.convert.openrlhf import algorithm, roles, rows
from plimsoll.convert.openrlhf.arguments import FLAGS, known_flags, read_options
from plimsoll.convert.openrlhf.flag import COMMANDS, Flag, Idle, Key, Lacking, Part, Rule, Same
from plimsoll.convert.openrlhf.options import Options
from plimsoll.convert.openrlhf.version import Version, written
from plimsoll.convert.outcome import Entry, Outcome, Remark
from plimsoll.convert.result import Converted, converted, differences
from plimsoll.errors import ConfigError, PlimsollError

_JOBS: Mapping[str, Callable[[Options], str]] = {
    **dict.fromkeys(("ppo", "local"), algorithm.command_of),
    **{name: (lambda o: o.command) for name in ("sft", "rm", "dpo", "kto")},
    "kd": lambda o: "distill",
}
_ALWAYS: tuple[Rule, ...] = (roles.ranks, rows.columns)
"""Rules that no flag leads to."""
FORGOTTEN = "nothing was made of it beside the other flags"
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
    found = _converted(options)
    if told.first == told.last:
        return found
    which = f"The flags are those of {written(told.first)} to {written(told.last)}."
    return replace(found, told=f"{which} {_moved(found, launch, told.first, cards)}")


def _moved(found: Converted, launch: Launch, version: Version, cards: int | None) -> str:
    """What the first of the versions that it may be makes of it."""
    try:
        first = _converted(read_options(launch, version, cards)[0])
    except PlimsollError:
        return f"As one of {written(version)} it is refused: --version says which it is."
    other = [f"{k}: {write_value(v)}" for k, v in differences(found, first).items()]
    if not other:
        return "They mean the same in all of them."
    return f"--version {written(version)} would mean {', '.join(other)}."


def _converted(options: Options) -> Converted:
    if options.command not in _JOBS:
        raise ConfigError(_PRM)
    if options["pretrain"] is None:
        raise ConfigError(f"{options.names['pretrain']} is needed: the model to train.")
    refuse(_refused(options))
    outcomes = [*_outcomes(options), *_of_launch(options.launch)]
    outcomes += _forgotten(options, outcomes)
    return converted(
        _JOBS[options.command](options),
        [one for one in outcomes if _is_there(one, options)],
        {flag: options.shown(flag) for flag in options.values},
        frozenset(options.typed),
        f"OpenRLHF {written(options.version)}, {COMMANDS[options.command]}",
    )


def _refused(o: Options) -> Iterator[Problem]:
    """Flags without which the run would be another one."""
    for flag in FLAGS:
        lacks = flag.becomes
        if not (isinstance(lacks, Lacking) and lacks.refused and flag.id in o.typed):
            continue
        if o[flag.id] not in lacks.harmless:
            fix = "leave it out, or train it with OpenRLHF"
            name, _, value = o.shown(flag.id).partition(" ")
            yield invalid(name, value or None, f"Not supported: {lacks.why}.", fix)


def _outcomes(o: Options) -> Iterator[Outcome]:
    """Of all flags that the version has; and of rules that flags of other versions lead to, as what
    these ask for was fixed then."""
    rules: dict[Rule, None] = {}
    for flag in known_flags(o.command):
        if isinstance(flag.becomes, Part):
            rules[flag.becomes.rule] = None
        elif flag.id in o.values:
            yield from _plain(o, flag, flag.becomes)
    for rule in (*rules, *_ALWAYS):
        yield from rule(o)


def _plain(o: Options, flag: Flag, becomes: Key | Same | Idle | Lacking) -> Iterator[Outcome]:
    """Of a flag that stands alone."""
    value, typed = o[flag.id], flag.id in o.typed
    if isinstance(becomes, Key):
        yield from _keys(o, flag, becomes)
    elif not typed:
        return
    elif isinstance(becomes, Same | Idle):
        yield Remark("same" if isinstance(becomes, Same) else "idle", flag.id, becomes.why)
    elif value in becomes.harmless:
        yield Remark("same", flag.id, "it asks for nothing more")
    else:
        yield Remark("lacking", flag.id, becomes.why)


def _keys(o: Options, flag: Flag, key: Key) -> Iterator[Outcome]:
    value = o[flag.id]
    there = [path for path in key.paths if path.partition(".")[0] != "critic" or o.has_critic]
    made = None if value is None else key.how(value)
    if not there:
        yield from o.idle("there is no critic", flag.id)
    elif made is None:
        yield from o.same("it is off", flag.id)
    elif isinstance(made, tuple) and len(key.paths) > 1:
        for path, one in zip(key.paths, made, strict=False):
            if path in there:
                yield Entry(path, one, (flag.id,), key.note)
    else:
        for path in there:
            yield Entry(path, made, (flag.id,), key.note)


def _forgotten(o: Options, outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    """Of flags that no rule said anything of: there should be none."""
    told = {flag for one in outcomes if isinstance(one, Entry) for flag in one.flags}
    told |= {one.about for one in outcomes if isinstance(one, Remark)}
    for flag in o.typed:
        if flag not in told and o[flag] in (None, "", ()):
            yield Remark("idle", flag, "it is empty")
        elif flag not in told:
            yield Remark("check", flag, FORGOTTEN)


def _is_there(one: Outcome, o: Options) -> bool:
    """Remarks on flags that the version has not, and that were not given, are none."""
    return isinstance(one, Entry) or one.kind == "check" or one.about in o.values


def _of_launch(launch: Launch) -> Iterator[Outcome]:
    for why in launch.unknown:
        yield Remark("check", "the script", f"{why}; give it by --set NAME=VALUE")
