"""What was converted, for people: the config as YAML with where each line comes from, and a table
of every flag."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plimsoll.config.yaml_tree import Path, write_value
from plimsoll.convert.outcome import Entry, Kind
from plimsoll.convert.result import Converted

_KINDS: Mapping[Kind, str] = {
    "same": "So without a key",
    "idle": "No effect here",
    "lacking": "Not supported, and left out",
    "unknown": "Not known, and left out",
    "check": "To check",
}


def config_text(found: Converted) -> str:
    """The config file. Every line says where it comes from; what is left out is told at the end."""
    comments = {tuple(entry.key.split(".")): _comment(found, entry) for entry in found.entries}
    left = [
        f"# left out: {_about(found, one.about)}: {one.why}"
        for one in found.remarks
        if one.kind in ("lacking", "unknown")
    ]
    head = f"# {found.job}: from {found.about}"
    return "\n".join([head, *_lines(found.values, comments, ()), *left, ""])


def _comment(found: Converted, entry: Entry) -> str:
    source = found.source(entry)
    plain = found.is_given(entry) or not entry.flags or source.startswith("no ")
    return source if plain else f"default: {source}"


def _lines(values: Mapping[str, Any], comments: Mapping[Path, str], above: Path) -> Iterator[str]:
    indent = "  " * len(above)
    for name, value in values.items():
        path = (*above, name)
        if path in comments:
            comment = f"  # {comments[path]}" if comments[path] else ""
            yield f"{indent}{write_value(name)}: {write_value(value)}{comment}"
        else:
            yield f"{indent}{write_value(name)}:"
            yield from _lines(value, comments, path)


def table_text(found: Converted, width: int = 100) -> str:
    """Every flag that was given, what became of it, and what was written for those that were
    not."""
    given = [entry for entry in found.entries if found.is_given(entry)]
    others = [entry for entry in found.entries if not found.is_given(entry)]
    head = f"{found.about} -> plimsoll {found.job}"
    parts = [_wrapped(f"{head}. {found.told}" if found.told else f"{head}.", "", width)]
    parts += _section("Mapped", found, given, width)
    parts += _section(f"{found.trainer}'s defaults that are other ones here", found, others, width)
    for kind, title in _KINDS.items():
        rows = [one for one in found.remarks if one.kind == kind]
        if rows:
            lines = [
                _wrapped(f"{_about(found, one.about)}: {one.why}", "  ", width) for one in rows
            ]
            parts.append("\n".join([title, *lines]))
    return "\n\n".join(parts)


def _section(title: str, found: Converted, entries: Sequence[Entry], width: int) -> Iterator[str]:
    if not entries:
        return
    grouped: dict[str, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(found.source(entry), []).append(entry)
    lines = [title]
    for source, own in grouped.items():
        keys = [_key(entry) for entry in own]
        lines.append(_wrapped(f"{source}  ->  {', '.join(keys)}", "  ", width))
    yield "\n".join(lines)


def _key(entry: Entry) -> str:
    note = f" ({entry.note})" if entry.note and entry.flags else ""
    return f"{entry.key}: {write_value(entry.value)}{note}"


def _about(found: Converted, about: str) -> str:
    return found.shown.get(about, about)


def _wrapped(text: str, indent: str, width: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
