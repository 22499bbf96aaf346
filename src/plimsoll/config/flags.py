"""Dotted flags: `--section.key value` sets one key of the config.

Two forms: `--section.key value` and `--section.key=value` (for a value that begins with `--`).
A flag's value is read as a value of YAML, except that `#` begins no comment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

from plimsoll.config.secrets import mask_urls
from plimsoll.config.yaml_tree import FLAG, Path, Tree, read_value
from plimsoll.errors import ConfigError

_UNDOTTED = ("--preset", "--variant")
"""The keys that have a value and no section."""


@dataclass(frozen=True)
class Flag:
    """One dotted flag with its value."""

    path: Path
    value: object

    @property
    def name(self) -> str:
        """The flag as it is typed."""
        return "--" + ".".join(self.path)


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the other arguments of a command line, and its dotted flags with their values."""
    rest: list[str] = []
    flags: list[str] = []
    for piece in _pieces(arguments):
        (flags if _is_flag(piece[0]) else rest).extend(piece)
    return rest, flags


def parse_flags(arguments: Sequence[str]) -> tuple[Flag, ...]:
    """Return the dotted flags of a command line.

    Raises:
        ConfigError: a flag has no value or is given twice (or with one of its sections), a value
            cannot be read, or an argument is no dotted flag.
    """
    flags: list[Flag] = []
    for piece in _pieces(arguments):
        flag = _parse(piece)
        for earlier in flags:
            if flag.path == earlier.path:
                raise ConfigError(f"{flag.name} is given twice. Give it once.")
            shorter = min(len(flag.path), len(earlier.path))
            if flag.path[:shorter] == earlier.path[:shorter]:
                raise ConfigError(f"{earlier.name} and {flag.name} set the same key. Give one.")
        flags.append(flag)
    return tuple(flags)


def apply_flags(tree: Tree, flags: Sequence[Flag]) -> Tree:
    """Return a copy of the tree in which the flags' values replace the tree's."""
    values: dict[str, object] = tree.values
    origins = dict(tree.origins)
    for flag in flags:
        values = _with_value(values, flag.path, flag, tree.origins)
        origins = {p: at for p, at in origins.items() if p[: len(flag.path)] != flag.path}
        origins[flag.path] = f"{FLAG}{flag.name}"
    return Tree(values, origins)


def _pieces(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yield the arguments, each flag together with the value that follows it."""
    waiting = list(arguments)
    while waiting:
        piece = [waiting.pop(0)]
        if _is_flag(piece[0]) and "=" not in piece[0] and waiting and waiting[0][:2] != "--":
            piece.append(waiting.pop(0))
        yield piece


def _is_flag(argument: str) -> bool:
    name = argument.partition("=")[0]
    return name in _UNDOTTED or (name.startswith("--") and "." in name)


def _parse(piece: list[str]) -> Flag:
    name, equals, after = piece[0].partition("=")
    path = tuple(name[2:].split("."))
    if not _is_flag(piece[0]) or not all(path):
        raise ConfigError(
            f"{mask_urls(repr(piece[0]))} is no dotted flag. Write --section.key value."
        )
    if not equals and len(piece) == 1:
        raise ConfigError(
            f"{name} has no value. Write `{name} VALUE`, or `{name}=VALUE` for a value that "
            f"begins with `--`; what is switched on takes `true`."
        )
    text = after if equals else piece[1]
    try:
        return Flag(path, read_value(text))
    except (yaml.YAMLError, ConfigError) as error:
        raise ConfigError(
            f"{name}: the value {mask_urls(repr(text))} begins with a bracket or a quote and is no "
            f"complete YAML list, mapping or text. Put a text that begins so in quotes: "
            f"{name} \"'...'\"."
        ) from error


def _with_value(
    values: dict[str, object], path: Path, flag: Flag, origins: dict[Path, str]
) -> dict[str, object]:
    """Return a copy of nested `values` in which `path` has the flag's value.

    `path` is the end of the flag's path. Missing and empty sections are made.
    """
    first, *rest = path
    if not rest:
        return {**values, first: flag.value}
    below = values.get(first)
    if below is not None and not isinstance(below, dict):
        section = flag.path[: len(flag.path) - len(rest)]
        raise ConfigError(
            f"{flag.name} cannot be set: {'.'.join(section)} is {mask_urls(repr(below))} "
            f"({origins.get(section, 'set by a flag')}), and a section is needed there."
        )
    return {**values, first: _with_value(below or {}, tuple(rest), flag, origins)}
