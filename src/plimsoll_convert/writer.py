"""Turn the values of a foreign run into a checked config, and show it as YAML and as a table.

A default of the other trainer is written if Plimsoll's default differs. It is left out if the
config means the same without it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import Any

from pydantic import ValidationError

from plimsoll.config.keys import Key, keys_of
from plimsoll.config.load import leaves, with_preset
from plimsoll.config.problems import Problem, invalid, refuse
from plimsoll.config.run import JobConfig
from plimsoll.config.yaml_tree import Path, Tree, write_value
from plimsoll.jobs import JOBS
from plimsoll.resolve.load import spec_of
from plimsoll.resolve.run_spec import RunSpec
from plimsoll_convert.absences import RemarkKind
from plimsoll_convert.settings import NO_VALUE, Keys, Options, Remark, Sourced, Value

_UNUSED = "it changes nothing beside the other settings"
_KINDS: Mapping[RemarkKind, str] = {
    "same": "So without a key",
    "idle": "No effect here",
    "lacking": "Not supported, and left out",
    "unknown": "Not known, and left out",
    "check": "To check",
}


@dataclass(frozen=True)
class Converted:
    """A config that was made from a foreign command.

    Attributes:
        job: Plimsoll's command.
        entries: Values that are written, by their keys, in the order of a config.
        remarks: Remarks on settings without a key.
        shown: Text of each setting by id: as typed, or with its default.
        typed: Ids of the settings that were given.
        about: What was converted, such as the trainer, its version and its program.
        version_note: How the version was found.
    """

    job: str
    entries: Mapping[str, Sourced]
    remarks: tuple[Remark, ...]
    shown: Mapping[str, str]
    typed: frozenset[str]
    about: str
    version_note: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """The values, nested as in a config file."""
        return _nest(self.entries)

    def is_given(self, entry: Sourced) -> bool:
        """Return whether an entry comes from the command, and not only from foreign defaults."""
        return any(id in self.typed for id in entry.settings)

    def origin(self, entry: Sourced) -> str:
        """Return the text of the settings from which an entry was made, on one line.

        If settings were given, only these are shown. Without settings, return the entry's note.
        """
        given = [self.shown[id] for id in entry.settings if id in self.typed]
        if given:
            return " ".join(given)
        return " ".join(self.shown[id] for id in entry.settings) or entry.note


def write_config(job: str, run: Keys, o: Options, about: str, version_note: str = "") -> Converted:
    """Return the checked config of a run.

    Args:
        job: Plimsoll's command.
        run: The run that the foreign command describes, by the keys of a config.
        o: The settings of the foreign command.
        about: What was converted, with the trainer's name first.
        version_note: How the version was found.

    Raises:
        ConfigError: A setting cannot be left out, or the config is wrong. The message names the
            foreign settings.
        SettingsConflict: Settings cannot work together.
    """
    absent = {id: reason for id in o.typed if (reason := o.settings[id].absent) is not None}
    fix = f"leave it out, or train it with {about.partition(' ')[0]}"
    problems: list[Problem] = []
    for id, reason in absent.items():
        if reason.refused and o[id] not in reason.harmless:
            name, _, value = o.show(id).replace("=", " ", 1).partition(" ")
            problems.append(invalid(name, value or None, f"Not supported: {reason.why}.", fix))
    refuse(problems)
    rules = dict(_walk(run))
    table = {
        key: value
        for key, value in o.table_keys().items()
        if not any(f"{key}.".startswith(f"{rule}.") for rule in rules)
    }
    said = table | {key: value for key, value in rules.items() if isinstance(value, Sourced)}
    entries = {key: value for key, value in said.items() if value.value is not NO_VALUE}
    used = {id for entry in entries.values() for id in entry.settings}
    all_remarks = [
        Remark("same", id, "it asks for nothing more")
        if reason.kind == "lacking" and o[id] in reason.harmless
        else Remark(reason.kind, id, reason.why)
        for id, reason in absent.items()
    ]
    left_out = [value for value in rules.values() if isinstance(value, Remark)]
    all_remarks += [*o.remarks, *left_out]
    all_remarks += [Remark("check", key, value.check) for key, value in said.items() if value.check]
    for why in o.launch.unknown:
        all_remarks.append(Remark("check", "the script", f"{why}; give it by --set NAME=VALUE"))
    about_setting = {remark.about for remark in all_remarks}
    all_remarks += [Remark("idle", id, _UNUSED) for id in o.typed if id not in used | about_setting]
    converted = Converted(
        job,
        _in_order(job, entries),
        tuple(dict.fromkeys(all_remarks)),
        {id: o.show(id) for id in o.values},
        frozenset(o.typed),
        about,
        version_note,
    )
    _spec(converted)
    return _without_defaults(converted)


def _walk(part: Keys, section: str = "") -> Iterator[tuple[str, Value | Remark]]:
    """Yield (key, value) for every value of a section, at all levels; None for an absent key."""
    for name, inner in part.items():
        key = name[1:] if name.startswith("/") else ".".join(filter(None, (section, name)))
        if inner is None or isinstance(inner, Sourced | Remark):
            yield key, inner
        else:
            yield from _walk(inner, key)


def _nest(entries: Mapping[str, Sourced]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, entry in entries.items():
        *sections, last = key.split(".")
        below = values
        for section in sections:
            below = below.setdefault(section, {})
        below[last] = entry.value
    return values


def _in_order(job: str, entries: Mapping[str, Sourced]) -> dict[str, Sourced]:
    """Return the entries in the order of the keys in the job's help."""
    keys = _config_keys(job)

    def place(name: str) -> int:
        path = tuple(name.split("."))
        return next((i for i, key in enumerate(keys) if key.covers(path)), len(keys))

    return {name: entries[name] for name in sorted(entries, key=place)}


@cache
def _config_keys(job: str) -> tuple[Key, ...]:
    return tuple(keys_of(JOBS[job].config))


def cards_of_machine(converted: Converted) -> int:
    """Return the number of cards that the run needs per machine; 0 if it runs on CPUs."""
    if converted.values.get("cluster", {}).get("device") == "cpu":
        return 0
    spec = _spec(converted)
    engines = spec.engines
    apart = engines.all_parts if engines and engines.placement == "own" else 0
    return ceil((spec.cluster.all_ranks + apart) / spec.cluster.nodes)


def _spec(converted: Converted) -> RunSpec[Any]:
    """Return the run spec of the config. Errors name the foreign settings of a wrong value."""
    origins: dict[Path, str] = {
        tuple(key.split(".")): converted.origin(entry) for key, entry in converted.entries.items()
    }
    return spec_of(JOBS[converted.job], Tree(converted.values, origins))[0]


def _without_defaults(converted: Converted) -> Converted:
    """Return the config without keys that no setting gave and that do not change its meaning."""
    meaning = _config(converted.job, converted.entries)
    kept = dict(converted.entries)
    for key, entry in converted.entries.items():
        if converted.is_given(entry):
            continue
        fewer = {other: kept[other] for other in kept if other != key}
        with suppress(ValidationError):  # a key is needed
            if _config(converted.job, fewer) == meaning:
                kept = fewer
    return replace(converted, entries=kept)


def _config(job: str, entries: Mapping[str, Sourced]) -> JobConfig:
    """Return the config with all defaults."""
    tree = with_preset(Tree(_nest(entries), {}), JOBS[job].presets, JOBS[job].preset)
    config: JobConfig = JOBS[job].config.model_validate(tree.values)
    return config


def differences(first: Converted, second: Converted) -> dict[str, object]:
    """Return the keys in which two configs differ, with the second config's values."""
    a, b = (leaves(_config(c.job, c.entries).model_dump(mode="json")) for c in (first, second))
    return {".".join(p): b.get(p) for p in dict.fromkeys([*b, *a]) if a.get(p) != b.get(p)}


def config_text(converted: Converted) -> str:
    """Return the config as YAML text.

    A comment on each line says its origin. Comments at the end list the settings left out.
    """
    left = [
        f"# left out: {_describe(converted, remark)}"
        for remark in converted.remarks
        if remark.kind in ("lacking", "unknown")
    ]
    head = f"# {converted.job}: from {converted.about}"
    return "\n".join([head, *_lines(converted, converted.values, ()), *left, ""])


def _lines(converted: Converted, values: Mapping[str, Any], above: Path) -> Iterator[str]:
    """Yield the lines of a section, each value with its origin in a comment."""
    indent = "  " * len(above)
    for name, value in values.items():
        path = (*above, name)
        entry = converted.entries.get(".".join(path))
        if entry is None:
            yield f"{indent}{write_value(name)}:"
            yield from _lines(converted, value, path)
            continue
        origin = converted.origin(entry)
        plain = converted.is_given(entry) or not entry.settings or origin.startswith("no ")
        comment = f"  # {'' if plain else 'default: '}{origin}" if origin else ""
        yield f"{indent}{write_value(name)}: {write_value(value)}{comment}"


def table_text(converted: Converted, width: int = 100) -> str:
    """Return a text that lists how each given setting was converted, and the defaults written."""
    given = {key: e for key, e in converted.entries.items() if converted.is_given(e)}
    others = {key: e for key, e in converted.entries.items() if key not in given}
    sections = {
        "Mapped": _rows(converted, given),
        f"{converted.about.partition(' ')[0]}'s defaults that are other ones here": _rows(
            converted, others
        ),
    }
    for kind, title in _KINDS.items():
        remarks = (remark for remark in converted.remarks if remark.kind == kind)
        sections[title] = [_describe(converted, remark) for remark in remarks]
    head = f"{converted.about} -> plimsoll {converted.job}. {converted.version_note}".rstrip()
    parts = [_wrap(head, "", width)]
    parts += [
        "\n".join([title, *(_wrap(row, "  ", width) for row in rows)])
        for title, rows in sections.items()
        if rows
    ]
    return "\n\n".join(parts)


def _rows(converted: Converted, entries: Mapping[str, Sourced]) -> list[str]:
    """Return a row for each origin, with the keys that were made from it."""
    grouped: dict[str, list[str]] = {}
    for key, entry in entries.items():
        note = f" ({entry.note})" if entry.note and entry.settings else ""
        text = f"{key}: {write_value(entry.value)}{note}"
        grouped.setdefault(converted.origin(entry), []).append(text)
    return [f"{origin}  ->  {', '.join(texts)}" for origin, texts in grouped.items()]


def _describe(converted: Converted, remark: Remark) -> str:
    return f"{converted.shown.get(remark.about, remark.about)}: {remark.why}"


def _wrap(text: str, indent: str, width: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
