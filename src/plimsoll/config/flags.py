"""Dotted flags: `--section.key value` sets one key of the config, in values or in its YAML text.

Two forms: `--section.key value` and `--section.key=value` (for a value that begins with `--`).
A flag's value is read as a value of YAML, except that `#` begins no comment.

In YAML text, comments, order and layout of everything else stay. PyYAML's nodes say where values
are. An alias stays if it still equals its anchor; otherwise its keys are written out.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from plimsoll.config.secrets import mask_urls
from plimsoll.config.yaml_tree import (
    FLAG,
    Path,
    Tree,
    read_tree,
    read_value,
    write_tree,
    write_value,
)
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


_Pair = tuple[yaml.Node, yaml.Node]
"""A key and its value."""
_ANCHOR = re.compile(r"(&\S+\s+)?")


_Edit = tuple[int, int, str]
"""A replacement: where it starts and ends in the text, and what comes in its place."""


def write_flags(text: str, name: str, flags: Sequence[Flag]) -> str:
    """Return the text of one YAML document with the flags' values in it.

    `name` is what messages call the text.

    Raises:
        ConfigError: as `read_tree` and `apply_flags`, and for a layout that cannot be edited.
    """
    text = text if text.endswith("\n") else f"{text}\n"
    tree = read_tree(text, name)
    wanted = apply_flags(tree, flags).values
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):  # the text is empty or has only comments
        return f"{text}{write_tree(wanted)}".lstrip("\n")
    edits = sorted(_Editor(text).mapping(root, tree.values, wanted), key=lambda edit: edit[0])
    edited, at = "", 0
    for start, end, new_text in edits:
        edited += text[at:start] + new_text
        at = end
    edited += text[at:]
    if not _is_as_wanted(edited, name, wanted):
        typed = " ".join(f"{flag.name} {write_value(flag.value)}" for flag in flags)
        raise ConfigError(
            f"{name}: its layout is one that cannot be edited. Give the keys as flags: {typed}"
        )
    return edited


def _is_as_wanted(text: str, name: str, wanted: Mapping[str, object]) -> bool:
    try:
        return _exact(read_tree(text, name).values) == _exact(wanted)
    except ConfigError:
        return False


def _exact(value: object) -> str:
    """Return a text that distinguishes `true` from 1, and 1 from 1.0."""
    return json.dumps(value, sort_keys=True)


class _Editor:
    """Compares the values in a document with the wanted values, and yields the edits.

    Attributes:
        text: the document.
        aliases: start and end of each alias in the text.
        anchored: wanted values of nodes, by the id of the node.
    """

    def __init__(self, text: str) -> None:
        tokens = yaml.scan(text, Loader=yaml.SafeLoader)
        aliases = [token for token in tokens if type(token) is yaml.AliasToken]
        self.text = text
        self.aliases: list[tuple[int, int]]
        self.aliases = [(a.start_mark.index, a.end_mark.index) for a in aliases]
        self.anchored: dict[int, object] = {}

    def mapping(
        self, node: yaml.MappingNode, held: Mapping[str, object], wanted: Mapping[str, object]
    ) -> Iterator[_Edit]:
        """Yield the edits of a section, in the order of the text.

        Edits of the same place are in their order there.
        """
        for key, value in node.value:
            yield from self._value(node, (key, value), held[key.value], wanted[key.value])
        missing = {key: value for key, value in wanted.items() if key not in held}
        if missing:
            yield self._add_keys(node, missing)

    def _value(
        self, within: yaml.MappingNode, pair: _Pair, held: Any, wanted: Any
    ) -> Iterator[_Edit]:
        key, node = pair
        if node.start_mark.index < key.start_mark.index:  # an alias: the node is the anchor's
            if _exact(wanted) != _exact(self.anchored.get(id(node), held)):
                alias = next(a for a in self.aliases if a[0] >= key.end_mark.index)
                yield from self._replace_value(within, key, *alias, wanted)
            return
        self.anchored[id(node)] = wanted
        stays = isinstance(held, Mapping) and isinstance(wanted, Mapping) and {*held} <= {*wanted}
        if isinstance(node, yaml.MappingNode) and stays:
            yield from self.mapping(node, held, wanted)
        elif _exact(wanted) != _exact(held):
            yield from self._replace_value(
                within, key, self._start(key, node), self._end(node), wanted
            )

    def _start(self, key: yaml.Node, node: yaml.Node) -> int:
        """Return where the replaced text begins: after the anchor, or after a block's colon."""
        if isinstance(node, yaml.CollectionNode) and not node.flow_style:
            return self.text.index(":", key.end_mark.index) + 1
        anchor = _ANCHOR.match(self.text, node.start_mark.index)
        assert anchor is not None
        return anchor.end()

    def _replace_value(
        self, within: yaml.MappingNode, key: yaml.Node, start: int, end: int, wanted: object
    ) -> Iterator[_Edit]:
        """Yield the edits that give a key another value.

        A section goes below the key's line, which may have a comment after its colon.
        """
        if within.flow_style or not isinstance(wanted, Mapping) or not wanted:
            space = " " * (self.text[start - 1] == ":")
            line = "\n" * self.text[start:end].endswith("\n")  # the value is a block of text
            # Quoted as in a list, since a comma may stand for an end here, too.
            yield start, end, f"{space}{write_value([wanted])[1:-1]}{line}"
            return
        yield len(self.text[:start].rstrip(" ")), end, ""
        yield self._insert_below(end, key.start_mark.column + 2, wanted)

    def _add_keys(self, node: yaml.MappingNode, missing: Mapping[str, object]) -> _Edit:
        """Return the edit that adds keys to a section, after those that it has."""
        if node.flow_style:
            pairs = write_value(missing)[1:-1]
            at = self._end_of_last(node) if node.value else self._end(node) - 1
            return at, at, f", {pairs}" if node.value else pairs
        return self._insert_below(self._end(node), node.value[0][0].start_mark.column, missing)

    def _insert_below(self, at: int, column: int, values: Mapping[str, object]) -> _Edit:
        """Return the edit that puts keys on lines of their own, after the line that `at` ends."""
        new_lines = textwrap.indent(write_tree(dict(values)), " " * column)
        if self.text[at - 1] != "\n":
            at = self.text.index("\n", at) + 1
        return at, at, new_lines

    def _end(self, node: yaml.Node) -> int:
        """Return the position after a node's last character.

        PyYAML's end of a block is where the next node begins.
        """
        if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
            return self._end_of_last(node)
        return int(node.end_mark.index)

    def _end_of_last(self, node: yaml.Node) -> int:
        last = node.value[-1]
        before, value = last if isinstance(last, tuple) else (node, last)
        if value.start_mark.index < before.start_mark.index:
            return max(end for _, end in self.aliases if end <= node.end_mark.index)
        return self._end(value)
