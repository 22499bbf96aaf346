"""From the settings that were given, by a trainer's table of what each becomes, to a config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from plimsoll.config.problems import Problem, invalid, refuse
from plimsoll.convert.launch import Launch
from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Entry, Outcome, Remark
from plimsoll.convert.result import Converted, converted
from plimsoll.convert.setting import Becomes, Idle, Key, Lacking, Part, Rule, Same

FORGOTTEN = "nothing was made of it beside the other flags"


class Named(Protocol):
    """A setting in a trainer's table. id: what the rules call it."""

    @property
    def id(self) -> str: ...

    @property
    def becomes(self) -> Becomes: ...


def config_of(
    job: str,
    options: Options,
    settings: Sequence[Named],
    always: Sequence[Rule],
    about: str,
    further: Sequence[Outcome] = (),
) -> Converted:
    """settings: all that the command has, in the table's order. always: rules that no setting leads
    to. about: what was read, the trainer's name first. further: what was found besides.

    Raises ConfigError for settings without which the run would be another one; and as
    `converted`.
    """
    refuse(_refused(options, settings, about.partition(" ")[0]))
    outcomes = [*_outcomes(options, settings, always), *_of_launch(options.launch)]
    outcomes += _forgotten(options, outcomes)
    written = {flag for one in outcomes if isinstance(one, Entry) for flag in one.flags}
    return converted(
        job,
        [*(one for one in outcomes if _is_there(one, options, written)), *further],
        {flag: options.shown(flag) for flag in options.values},
        frozenset(options.typed),
        about,
    )


def _refused(o: Options, settings: Sequence[Named], trainer: str) -> Iterator[Problem]:
    """Settings without which the run would be another one."""
    for flag in settings:
        lacks = flag.becomes
        if not (isinstance(lacks, Lacking) and lacks.refused and flag.id in o.typed):
            continue
        if o[flag.id] not in lacks.harmless:
            fix = f"leave it out, or train it with {trainer}"
            name, _, value = re.split("([ =])", f"{o.shown(flag.id)} ", maxsplit=1)
            yield invalid(name, value.strip() or None, f"Not supported: {lacks.why}.", fix)


def _outcomes(o: Options, settings: Sequence[Named], always: Sequence[Rule]) -> Iterator[Outcome]:
    """Of all settings that there are; and of rules that those of other versions lead to, as what
    these ask for was fixed then."""
    rules: dict[Rule, None] = {}
    for flag in settings:
        if isinstance(flag.becomes, Part):
            rules[flag.becomes.rule] = None
        elif flag.id in o.values:
            yield from _plain(o, flag, flag.becomes)
    for rule in (*rules, *always):
        yield from rule(o)


def _plain(o: Options, flag: Named, becomes: Key | Same | Idle | Lacking) -> Iterator[Outcome]:
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


def _keys(o: Options, flag: Named, key: Key) -> Iterator[Outcome]:
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


def _is_there(one: Outcome, o: Options, written: set[str]) -> bool:
    """Remarks on flags that the version has not, and that were not given, are none; nor are those
    that a flag of which a key was made is so without one."""
    if isinstance(one, Entry) or one.kind == "check":
        return True
    return one.about in o.values and not (one.kind == "same" and one.about in written)


def _of_launch(launch: Launch) -> Iterator[Outcome]:
    for why in launch.unknown:
        yield Remark("check", "the script", f"{why}; give it by --set NAME=VALUE")
