"""Turn a foreign run into a checked config. The keys of a config stand here alone.

What another trainer's default says is written where Plimsoll's says otherwise, and left out where
the config means the same without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import ceil
from typing import Any

from pydantic import ValidationError

from plimsoll.config.keys import Key, keys_of
from plimsoll.config.presets import leaves, with_preset
from plimsoll.config.problems import Problem, invalid, refuse
from plimsoll.config.rollout import RolloutConfig
from plimsoll.config.run import JobConfig
from plimsoll.config.yaml_tree import Path, Tree
from plimsoll.interop.convert import foreign
from plimsoll.interop.convert.absences import Absence
from plimsoll.interop.convert.foreign import NO_VALUE, Sourced
from plimsoll.interop.convert.options import Options, Remark
from plimsoll.jobs import JOBS
from plimsoll.spec.load import spec_of
from plimsoll.spec.run_spec import RunSpec

_KEYS: Mapping[tuple[type, str], str] = {
    (foreign.ForeignRun, "machines"): "cluster",
    (foreign.ForeignRun, "agents"): "environments",
    (foreign.LearningRole, "sharding"): "zero",
    (foreign.LearningRole, "average_decay"): "ema.decay",
    (foreign.Sharding, "secondary_partition"): "hpz_partition_size",
    (foreign.Optimizer, "schedule"): "",
    (foreign.Schedule, "shape"): "schedule",
    (foreign.Data, "held_out"): "eval",
    (foreign.Data, "longest"): "max_tokens",
    (foreign.Data, "mixture"): "train",
    (foreign.ForeignRows, "columns"): "",
    (foreign.GroupFilter, "most_drawn"): "max_drawn",
    (foreign.ScoringRole, "stage"): "zero.stage",
    (foreign.ScoringRole, "offload"): "zero.offload",
    (foreign.Rollout, "tensor_parallel"): "vllm.tensor_parallel",
    (foreign.Rollout, "pipeline_parallel"): "vllm.pipeline_parallel",
    (foreign.Rollout, "memory_share"): "vllm.memory_share",
    (foreign.Rollout, "sleep_level"): "vllm.sleep_level",
    (foreign.Rollout, "enforce_eager"): "vllm.arguments.enforce_eager",
    (foreign.Rollout, "max_num_batched_tokens"): "vllm.arguments.max_num_batched_tokens",
    (foreign.KL, "target"): "adaptive.target",
    (foreign.KL, "target_per"): "adaptive.per",
    (foreign.KL, "horizon"): "adaptive.horizon",
    (foreign.Rollout, "eval_sampling"): "/eval_sampling",
    (foreign.RewardTerm, "server"): "http",
    (foreign.Algorithm, "noise"): "neftune_alpha",
    (foreign.Algorithm, "precompute_reference"): "/reference_logprobs.precompute",
}
"""Keys of the fields that the config calls otherwise. A field without a line here has its own name;
an empty key adds nothing; a key after `/` stands at the top."""
_UNUSED = "it changes nothing beside the other settings"


@dataclass(frozen=True)
class Entry:
    """A key of the config with its value, the settings that it was made of, and how."""

    key: str
    value: object
    flags: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Converted:
    """A config that was made of a foreign command.

    Attributes:
        job: Command of Plimsoll.
        entries: Keys that are written, in the order of a config.
        remarks: Remarks on settings without a key.
        shown: Each setting as it was typed, or with its default.
        typed: Settings that were given.
        about: What was read.
        version_note: How the version was found.
    """

    job: str
    entries: tuple[Entry, ...]
    remarks: tuple[Remark, ...]
    shown: Mapping[str, str]
    typed: frozenset[str]
    about: str
    version_note: str = ""

    @property
    def trainer(self) -> str:
        """The name of the foreign trainer."""
        return self.about.partition(" ")[0]

    @property
    def values(self) -> dict[str, Any]:
        """The values, nested as in a config file."""
        return _nest(self.entries)

    def is_given(self, entry: Entry) -> bool:
        """Return whether the command says it, and not a default of the foreign trainer."""
        return any(flag in self.typed for flag in entry.flags)

    def origin(self, entry: Entry) -> str:
        """Return where a key comes from, on one line."""
        given = [self.shown[flag] for flag in entry.flags if flag in self.typed]
        if given:
            return " ".join(given)
        return " ".join(self.shown[flag] for flag in entry.flags) or entry.note


def write_config(
    job: str,
    run: foreign.ForeignRun,
    o: Options,
    absent: Mapping[str, Absence],
    remarks: Iterable[Remark],
    about: str,
) -> Converted:
    """Return the checked config of a run.

    Args:
        job: Command of Plimsoll.
        run: What the command says.
        o: Its settings.
        absent: Settings without a counterpart, with the reason.
        remarks: Further remarks.
        about: What was read, the trainer's name first.

    Raises:
        ConfigError: A setting cannot be left out, or the config is wrong. The message names the
            foreign settings.
        SettingsConflict: Settings cannot work together.
    """
    refuse(_refusals(o, absent, about.partition(" ")[0]))
    entries: dict[str, Entry] = {}
    checks: list[Remark] = []
    for key, traced in _walk(run, ""):
        if traced.check:
            checks.append(Remark("check", key, traced.check))
        if traced.value is not NO_VALUE:
            entries[key] = Entry(key, traced.value, traced.settings, traced.note)
    entries = _with_sections(entries)
    used = {flag for entry in entries.values() for flag in entry.flags}
    all_remarks = [*_absent_remarks(o, absent), *remarks, *checks, *_script_remarks(o)]
    about_setting = {remark.about for remark in all_remarks}
    all_remarks += [Remark("idle", id, _UNUSED) for id in o.typed if id not in used | about_setting]
    converted = Converted(
        job,
        _in_order(job, list(entries.values())),
        tuple(dict.fromkeys(all_remarks)),
        {id: o.show(id) for id in o.values},
        frozenset(o.typed),
        about,
    )
    _spec(converted)
    return _without_defaults(converted)


_ROLLOUT = "rollout."
"""Of a record, where what every engine has stands above the engine's name."""


def _with_sections(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries with the engine's settings under its name, and no KL as a value."""
    restated = dict(entries)
    engine = restated.pop(f"{_ROLLOUT}engine", None)
    place = entries.get("algorithm.kl.place")
    if engine is not None:
        restated = _with_engine(restated, engine)
    if place is not None and place.value == "none":
        restated = {k: e for k, e in restated.items() if not k.startswith("algorithm.kl.")}
        restated["algorithm.kl"] = replace(place, key="algorithm.kl")
    return restated


def _with_engine(entries: Mapping[str, Entry], engine: Entry) -> dict[str, Entry]:
    """Return the entries with what every engine has under the engine's name, and no other's."""
    section, common = f"{_ROLLOUT}{engine.value}", f"{_ROLLOUT}max_sequences"
    others = tuple(f"{_ROLLOUT}{name}." for name in RolloutConfig.engine_types)
    kept = {
        key.replace(common, f"{section}.max_sequences"): entry
        for key, entry in entries.items()
        if key.startswith(f"{section}.") or not key.startswith(others)
    }
    if not any(key.startswith(f"{section}.") for key in kept):
        kept[section] = replace(engine, value={})
    return {key: replace(entry, key=key) for key, entry in kept.items()}


def _walk(part: object, key: str) -> Iterator[tuple[str, Sourced]]:
    """Yield every value of a record with its key."""
    if isinstance(part, Sourced):
        yield key, part
    elif isinstance(part, Mapping):
        for name, inner in part.items():
            yield from _walk(inner, f"{key}.{name}")
    elif part is not None:
        for field in fields(part):  # type: ignore[arg-type]  # all other parts are dataclasses
            name = _KEYS.get((type(part), field.name), field.name)
            inner_key = name[1:] if name.startswith("/") else ".".join(filter(None, (key, name)))
            yield from _walk(getattr(part, field.name), inner_key)


def _refusals(o: Options, absent: Mapping[str, Absence], trainer: str) -> Iterator[Problem]:
    """Yield the settings without which the run would be another one."""
    for id in o.typed:
        reason = absent.get(id)
        if reason is not None and reason.refused and o[id] not in reason.harmless:
            name, _, value = o.show(id).replace("=", " ", 1).partition(" ")
            fix = f"leave it out, or train it with {trainer}"
            yield invalid(name, value or None, f"Not supported: {reason.why}.", fix)


def _absent_remarks(o: Options, absent: Mapping[str, Absence]) -> Iterator[Remark]:
    for id in o.typed:
        reason = absent.get(id)
        if reason is not None and reason.kind == "lacking" and o[id] in reason.harmless:
            yield Remark("same", id, "it asks for nothing more")
        elif reason is not None:
            yield Remark(reason.kind, id, reason.why)


def _script_remarks(o: Options) -> Iterator[Remark]:
    for why in o.launch.unknown:
        yield Remark("check", "the script", f"{why}; give it by --set NAME=VALUE")


def _nest(entries: Sequence[Entry]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for entry in entries:
        *sections, last = entry.key.split(".")
        below = values
        for section in sections:
            below = below.setdefault(section, {})
        below[last] = entry.value
    return values


def _in_order(job: str, entries: list[Entry]) -> tuple[Entry, ...]:
    """Return the entries in the order in which the help lists keys."""
    keys = _config_keys(job)

    def place(entry: Entry) -> int:
        path = tuple(entry.key.split("."))
        return next((i for i, key in enumerate(keys) if key.covers(path)), len(keys))

    return tuple(sorted(entries, key=place))


@cache
def _config_keys(job: str) -> tuple[Key, ...]:
    return tuple(keys_of(JOBS[job].config))


def cards_of_machine(converted: Converted) -> int:
    """Return the most cards that the run takes of one machine; 0 if it runs on CPUs."""
    if converted.values.get("cluster", {}).get("device") == "cpu":
        return 0
    spec = _spec(converted)
    engines = spec.engines
    apart = engines.all_parts if engines and engines.placement == "own" else 0
    return ceil((spec.cluster.all_ranks + apart) / spec.cluster.nodes)


def _spec(converted: Converted) -> RunSpec[Any]:
    """Return what the config means. Errors name the foreign settings that say it."""
    origins: dict[Path, str] = {
        tuple(entry.key.split(".")): converted.origin(entry) for entry in converted.entries
    }
    return spec_of(JOBS[converted.job], Tree(converted.values, origins))[0]


def _without_defaults(converted: Converted) -> Converted:
    """Leave out the keys that no setting said and that change nothing."""
    meaning = _meaning(converted.job, converted.entries)
    kept = list(converted.entries)
    for entry in converted.entries:
        fewer = [kept_entry for kept_entry in kept if kept_entry is not entry]
        if not converted.is_given(entry) and _meaning(converted.job, fewer) == meaning:
            kept = fewer
    return replace(converted, entries=tuple(kept))


def _meaning(job: str, entries: Sequence[Entry]) -> object:
    """Return the whole config, or None if the entries are none."""
    try:
        return _config(job, entries)
    except ValidationError:
        return None


def _config(job: str, entries: Sequence[Entry]) -> JobConfig:
    tree = with_preset(Tree(_nest(entries), {}), JOBS[job].presets, JOBS[job].preset)
    config: JobConfig = JOBS[job].config.model_validate(tree.values)
    return config


def differences(first: Converted, second: Converted) -> dict[str, object]:
    """Return the keys that the second config has otherwise, with its values."""
    a, b = (leaves(_config(c.job, c.entries).model_dump(mode="json")) for c in (first, second))
    return {".".join(p): b.get(p) for p in dict.fromkeys([*b, *a]) if a.get(p) != b.get(p)}
