"""Columns within columns, as Parquet's structs and JSON's objects have them: `extra_info.answer`
is `answer` in the object of the column `extra_info`. A column whose own name is written so comes
first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

_MISSING = object()


def with_named(values: Mapping[str, object], columns: Collection[str]) -> Mapping[str, object]:
    """A row's values, and under their dotted names those of the columns that lie within others."""
    found = {name: _at(values, name) for name in columns if "." in name and name not in values}
    there = {name: value for name, value in found.items() if value is not _MISSING}
    return {**values, **there} if there else values


def top_of(column: str, present: Collection[str]) -> str | None:
    """The column, of those that are present, that is named or that what is named lies within; None
    where there is none."""
    beginnings = (head for head, _ in _cuts(column))
    return next((name for name in (column, *beginnings) if name in present), None)


def names_of(values: Mapping[str, object], above: str = "") -> Iterator[str]:
    """All that a column could be named by, in a row's values or in a schema of the same form."""
    for name, value in values.items():
        yield f"{above}{name}"
        if isinstance(value, Mapping):
            yield from names_of(value, f"{above}{name}.")


def _at(values: Mapping[str, object], column: str) -> object:
    if column in values:
        return values[column]
    for head, rest in _cuts(column):
        within = values.get(head)
        if isinstance(within, Mapping) and (found := _at(within, rest)) is not _MISSING:
            return found
    return _MISSING


def _cuts(column: str) -> Iterator[tuple[str, str]]:
    """The ways to cut a name in two at one of its dots, the shortest beginning first."""
    parts = column.split(".")
    for i in range(1, len(parts)):
        yield ".".join(parts[:i]), ".".join(parts[i:])
