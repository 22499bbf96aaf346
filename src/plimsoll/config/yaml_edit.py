"""Edit keys in YAML text. Comments, order and layout of everything else stay.

PyYAML's nodes say where values are. An alias stays if it still equals its anchor; otherwise its
keys are written out.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from plimsoll.config.flags import Flag, apply_flags
from plimsoll.config.yaml_tree import read_tree, write_tree, write_value
from plimsoll.errors import ConfigError

_Pair = tuple[yaml.Node, yaml.Node]
"""A key and its value."""
_ANCHOR = re.compile(r"(&\S+\s+)?")


@dataclass(frozen=True)
class _Edit:
    """A replacement of the text from start to end."""

    start: int
    end: int
    text: str


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
    edits = sorted(_Editor.of(text).mapping(root, tree.values, wanted), key=lambda edit: edit.start)
    edited = _apply_edits(text, edits)
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


def _apply_edits(text: str, edits: Sequence[_Edit]) -> str:
    parts, at = [], 0
    for edit in edits:
        parts += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*parts, text[at:]])


def _exact(value: object) -> str:
    """Return a text that distinguishes `true` from 1, and 1 from 1.0."""
    return json.dumps(value, sort_keys=True)


@dataclass(frozen=True)
class _Editor:
    """Compares the values in a document with the wanted values, and yields the edits.

    Attributes:
        text: the document.
        aliases: start and end of each alias in the text.
        anchored: wanted values of nodes, by the id of the node.
    """

    text: str
    aliases: Sequence[tuple[int, int]]
    anchored: dict[int, object] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> _Editor:
        """Return an editor of a document."""
        tokens = yaml.scan(text, Loader=yaml.SafeLoader)
        aliases = [token for token in tokens if type(token) is yaml.AliasToken]
        return cls(text, [(a.start_mark.index, a.end_mark.index) for a in aliases])

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
                yield from self._replace_value(within, key, *self._alias_after(key), wanted)
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

    def _alias_after(self, key: yaml.Node) -> tuple[int, int]:
        return next(alias for alias in self.aliases if alias[0] >= key.end_mark.index)

    def _replace_value(
        self, within: yaml.MappingNode, key: yaml.Node, start: int, end: int, wanted: object
    ) -> Iterator[_Edit]:
        """Yield the edits that give a key another value.

        A section goes below the key's line, which may have a comment after its colon.
        """
        if within.flow_style or not isinstance(wanted, Mapping) or not wanted:
            space = " " * (self.text[start - 1] == ":")
            line = "\n" * self.text[start:end].endswith("\n")  # the value is a block of text
            yield _Edit(start, end, f"{space}{write_value(wanted)}{line}")
            return
        yield _Edit(len(self.text[:start].rstrip(" ")), end, "")
        yield self._insert_below(end, key.start_mark.column + 2, wanted)

    def _add_keys(self, node: yaml.MappingNode, missing: Mapping[str, object]) -> _Edit:
        """Return the edit that adds keys to a section, after those that it has."""
        if node.flow_style:
            pairs = write_value(missing)[1:-1]
            at = self._end_of_last(node) if node.value else self._end(node) - 1
            return _Edit(at, at, f", {pairs}" if node.value else pairs)
        return self._insert_below(self._end(node), node.value[0][0].start_mark.column, missing)

    def _insert_below(self, at: int, column: int, values: Mapping[str, object]) -> _Edit:
        """Return the edit that puts keys on lines of their own, after the line that `at` ends."""
        new_lines = textwrap.indent(write_tree(dict(values)), " " * column)
        if self.text[at - 1] != "\n":
            at = self.text.index("\n", at) + 1
        return _Edit(at, at, new_lines)

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
            ends = [end for _, end in self.aliases if end <= node.end_mark.index]
            return ends[-1]
        return self._end(value)
