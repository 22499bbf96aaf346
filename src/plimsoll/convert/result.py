"""From keys and remarks to a checked config: what another trainer's default says is written where
ours says otherwise, and left out where the config means the same without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import Any

from pydantic import ValidationError

from plimsoll.config.keys import Key, keys_of
from plimsoll.config.presets import leaves, with_preset
from plimsoll.config.run import JobConfig
from plimsoll.config.yaml_tree import Path, Tree
from plimsoll.convert.outcome import Entry, Outcome, Remark
from plimsoll.jobs import JOBS
from plimsoll.spec.load import spec_of
from plimsoll.spec.run_spec import RunSpec


@dataclass(frozen=True)
class Converted:
    """job: the command of Plimsoll's. entries: the keys that are written, in the order of a config.
    remarks: on flags without a key. shown: of each flag, as it was typed or with its default.
    typed: the flags that were given. about: what was read; told: how its version was told."""

    job: str
    entries: tuple[Entry, ...]
    remarks: tuple[Remark, ...]
    shown: Mapping[str, str]
    typed: frozenset[str]
    about: str
    told: str = ""

    @property
    def trainer(self) -> str:
        """Whose command it was."""
        return self.about.partition(" ")[0]

    @property
    def values(self) -> dict[str, Any]:
        """Nested, as in a config file."""
        return nested(self.entries)

    def is_given(self, entry: Entry) -> bool:
        """Whether the command says it, and not a default of another trainer's."""
        return any(flag in self.typed for flag in entry.flags)

    def source(self, entry: Entry) -> str:
        """Where a key comes from, on one line."""
        given = [self.shown[flag] for flag in entry.flags if flag in self.typed]
        if given:
            return " ".join(given)
        return " ".join(self.shown[flag] for flag in entry.flags) or entry.note


def converted(
    job: str,
    outcomes: Sequence[Outcome],
    shown: Mapping[str, str],
    typed: frozenset[str],
    about: str,
) -> Converted:
    """The checked config, with what means nothing left out.

    Raises ConfigError (exit code 2) or SettingsConflict (4) as the job does; what is wrong is said
    to be written at the flags.
    """
    entries = {one.key: one for one in outcomes if isinstance(one, Entry)}
    remarks = tuple(dict.fromkeys(one for one in outcomes if isinstance(one, Remark)))
    found = Converted(job, _ordered(job, list(entries.values())), remarks, shown, typed, about)
    _spec(found)
    return _without_defaults(found)


def nested(entries: Sequence[Entry]) -> dict[str, Any]:
    """The values of dotted keys."""
    values: dict[str, Any] = {}
    for entry in entries:
        *sections, last = entry.key.split(".")
        below = values
        for section in sections:
            below = below.setdefault(section, {})
        below[last] = entry.value
    return values


def _ordered(job: str, entries: list[Entry]) -> tuple[Entry, ...]:
    """In the order in which the help lists keys."""
    keys = _keys(job)

    def place(entry: Entry) -> int:
        path = tuple(entry.key.split("."))
        found = (i for i, key in enumerate(keys) if key.covers(path))
        return next(found, len(keys))

    return tuple(sorted(entries, key=place))


@cache
def _keys(job: str) -> tuple[Key, ...]:
    return tuple(keys_of(JOBS[job].config))


def cards_of_machine(found: Converted) -> int:
    """Return how many cards the run takes of each machine: the most, if the machines differ; 0 if
    it runs on CPUs."""
    spec = _spec(found)
    if spec.cluster.device == "cpu":
        return 0
    engines = spec.vllm
    own = engines.engines * engines.parts if engines and engines.placement == "own" else 0
    return ceil((spec.cluster.all_ranks + own) / spec.cluster.nodes)


def _spec(found: Converted) -> RunSpec[Any]:
    """Raises ConfigError or SettingsConflict with the flags that say what is wrong."""
    origins: dict[Path, str] = {
        tuple(entry.key.split(".")): found.source(entry) for entry in found.entries
    }
    return spec_of(JOBS[found.job], Tree(found.values, origins))[0]


def _without_defaults(found: Converted) -> Converted:
    """Without the keys that no flag said, and that change nothing."""
    meant = _meant(found.job, found.entries)
    kept = list(found.entries)
    for entry in found.entries:
        fewer = [one for one in kept if one is not entry]
        if not found.is_given(entry) and _meant(found.job, fewer) == meant:
            kept = fewer
    return replace(found, entries=tuple(kept))


def _meant(job: str, entries: Sequence[Entry]) -> object:
    """The whole config; None where it is none."""
    try:
        return _config(job, entries)
    except ValidationError:
        return None


def _config(job: str, entries: Sequence[Entry]) -> JobConfig:
    tree = with_preset(Tree(nested(entries), {}), JOBS[job].presets, JOBS[job].preset)
    config: JobConfig = JOBS[job].config.model_validate(tree.values)
    return config


def differences(found: Converted, other: Converted) -> dict[str, object]:
    """The keys that another config has otherwise, with what it has."""
    ours, theirs = (
        leaves(_config(c.job, c.entries).model_dump(mode="json")) for c in (found, other)
    )
    paths = dict.fromkeys([*theirs, *ours])
    return {".".join(p): theirs.get(p) for p in paths if ours.get(p) != theirs.get(p)}
