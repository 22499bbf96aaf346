"""Show a converted config: as YAML with the origin of each line, and as a table of all settings."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from plimsoll.config.yaml_tree import Path, write_value
from plimsoll_convert.absences import RemarkKind
from plimsoll_convert.values import Sourced
from plimsoll_convert.writer import Converted

_KINDS: Mapping[RemarkKind, str] = {
    "same": "So without a key",
    "idle": "No effect here",
    "lacking": "Not supported, and left out",
    "unknown": "Not known, and left out",
    "check": "To check",
}


def config_text(converted: Converted) -> str:
    """Return the config as YAML text.

    A comment on each line says its origin. Comments at the end list the settings left out.
    """
    comments = {
        tuple(key.split(".")): _comment(converted, entry)
        for key, entry in converted.entries.items()
    }
    left = [
        f"# left out: {_about(converted, remark.about)}: {remark.why}"
        for remark in converted.remarks
        if remark.kind in ("lacking", "unknown")
    ]
    head = f"# {converted.job}: from {converted.about}"
    return "\n".join([head, *_lines(converted.values, comments, ()), *left, ""])


def _comment(converted: Converted, entry: Sourced) -> str:
    origin = converted.origin(entry)
    plain = converted.is_given(entry) or not entry.settings or origin.startswith("no ")
    return origin if plain else f"default: {origin}"


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


def table_text(converted: Converted, width: int = 100) -> str:
    """Return a text that lists how each given setting was converted, and the defaults written."""
    given = {key: e for key, e in converted.entries.items() if converted.is_given(e)}
    others = {key: e for key, e in converted.entries.items() if key not in given}
    head = f"{converted.about} -> plimsoll {converted.job}"
    parts = [
        _wrap(
            f"{head}. {converted.version_note}" if converted.version_note else f"{head}.", "", width
        )
    ]
    parts += _section("Mapped", converted, given, width)
    parts += _section(
        f"{converted.trainer}'s defaults that are other ones here", converted, others, width
    )
    for kind, title in _KINDS.items():
        rows = [remark for remark in converted.remarks if remark.kind == kind]
        if rows:
            lines = [
                _wrap(f"{_about(converted, remark.about)}: {remark.why}", "  ", width)
                for remark in rows
            ]
            parts.append("\n".join([title, *lines]))
    return "\n\n".join(parts)


def _section(
    title: str, converted: Converted, entries: Mapping[str, Sourced], width: int
) -> Iterator[str]:
    if not entries:
        return
    grouped: dict[str, list[str]] = {}
    for key, entry in entries.items():
        note = f" ({entry.note})" if entry.note and entry.settings else ""
        text = f"{key}: {write_value(entry.value)}{note}"
        grouped.setdefault(converted.origin(entry), []).append(text)
    lines = [
        _wrap(f"{origin}  ->  {', '.join(texts)}", "  ", width) for origin, texts in grouped.items()
    ]
    yield "\n".join([title, *lines])


def _about(converted: Converted, about: str) -> str:
    return converted.shown.get(about, about)


def _wrap(text: str, indent: str, width: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
