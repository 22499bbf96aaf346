"""Read YAML text as plain values with the line of each key, and write such values.

Plain words are read as YAML 1.2 does (its core schema), because YAML 1.1 surprises: there
`1e-5` is text, `no` is false, `010` is 8, `12:30` is 750 and a date is no text. Anchors and
aliases work; merge keys (`<<`) and tags (`!!`) do not. Lists are read as tuples, as the config
models hold them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from plimsoll.config.secrets import mask_urls
from plimsoll.errors import ConfigError

Path = tuple[str, ...]
Origins = Mapping[Path, str]
"""The line or the flag that wrote each key path."""

_MOST_VALUES = 100_000
"""The most values in one document: a few aliases of aliases could make billions."""
_MOST_WHOLE = 1e16
"""Floats from it on are dumped with an exponent, and stay floats."""
_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?[0-9]+[eE][-+]?[0-9]+$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
_PLAIN_WORDS = {
    "null": (re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    # 18 digits are more than any setting needs, and each such number fits 64 bits.
    "int": (re.compile(r"[-+]?(0|[1-9][0-9_]{0,17})$"), list("-+0123456789")),
    "float": (_FLOAT, list("-+.0123456789")),
}


class _Loader(yaml.SafeLoader):
    """The safe loader with the plain words of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own way)


class _Dumper(yaml.SafeDumper):
    """The safe dumper, which quotes text that YAML 1.1 or 1.2 would not read as text."""


for _name, (_pattern, _first) in _PLAIN_WORDS.items():
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, _first)


def _float_or_whole(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    """Return a number; `1e3` is the integer 1000, which keys for any number take, too."""
    number: float = loader.construct_yaml_float(node)
    is_whole = "e" in node.value.lower() and number.is_integer() and abs(number) < _MOST_WHOLE
    return int(number) if is_whole else number


_Loader.add_constructor(_TAG + "float", _float_or_whole)


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Only in double quotes does PyYAML escape every line break that YAML knows (such as U+0085).
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _text_node)


@dataclass(frozen=True)
class Tree:
    """Nested values, and the line or flag that wrote each key path."""

    values: dict[str, object]
    origins: dict[Path, str]


def value_at(values: object, path: Sequence[str]) -> Any:
    """Return the value at a path of nested values, or None if there is none."""
    for name in path:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


FLAG = "flag "  # an origin on the command line begins with it


def origin_of(origins: Origins, path: Path) -> str:
    """Return where `path`, or else the first key within it, was written; "" if nowhere.

    Flags that changed parts of it are added, as the value is then not the one in the file.
    """
    within = {key: at for key, at in origins.items() if key[: len(path)] == path}
    first = within.get(path, next(iter(within.values()), ""))
    flags = [at for at in within.values() if at.startswith(FLAG) and at != first]
    return ", ".join([first, *flags])


def nearest_origin(origins: Origins, path: Path) -> str:
    """Return where `path`, or else the nearest section around it, was written."""
    upwards = [path[:length] for length in range(len(path), 0, -1)]
    return next((at for section in upwards if (at := origin_of(origins, section))), "")


def read_tree(text: str, name: str) -> Tree:
    """Read one YAML document whose top level is a mapping; an empty one is an empty mapping.

    `name` is what messages call the text, such as the file's path.

    Raises:
        ConfigError: the syntax is wrong, a key is written twice, there is a tag, or the top level
            is no mapping; the message has name and line.
    """
    origins: dict[Path, str] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        values = None if node is None else _Reader(loader, name, origins).value(node, (), ())
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_message(error, name)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {error}. Write it as UTF-8 text.") from error
    except RecursionError as error:
        raise ConfigError(f"{name} is nested too deeply to be read. Write it flatter.") from error
    if values is None:
        return Tree({}, {})
    if not isinstance(values, dict):
        raise ConfigError(
            f"{name}: the top level is {_kind(values)}, and a mapping is needed. "
            f"Write sections with keys, such as `run:` with `steps: 100` below it."
        )
    return Tree(values, origins)


def read_value(text: str) -> object:
    """Return the value that the text of a flag stands for.

    Text in quotes, lists and mappings are read as YAML's flow style. Anything else is one plain
    word or text, in which `#` and `: ` mean nothing.

    Raises:
        yaml.YAMLError: quotes or brackets are not closed.
    """
    if text.lstrip()[:1] in ("[", "{", '"', "'"):
        return read_tree(f"value: {text}", "the value").values["value"]
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    return loader.construct_object(yaml.ScalarNode(tag, text))


def write_tree(values: dict[str, Any]) -> str:
    """Return nested values as YAML text, in the order given; `read_tree` gives them back."""
    return yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )


def write_value(value: object) -> str:
    """Return a value as one line of YAML, in the order given."""
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=True,
        width=10**9,
    )
    return str(text).removesuffix("...\n").strip()


class _Reader:
    """Walks the nodes of one document, and notes in `origins` where keys were written."""

    def __init__(self, loader: _Loader, name: str, origins: dict[Path, str]) -> None:
        self.loader, self.name, self.origins = loader, name, origins
        self.number = itertools.count()

    def value(self, node: yaml.Node, path: Path, above: tuple[int, ...]) -> object:
        """Return the value of a node at `path`; `above` has the ids of the nodes around it."""
        if id(node) in above:
            raise ConfigError(f"{self._at(node)}: the alias contains itself. Write it out.")
        if next(self.number) == _MOST_VALUES:
            raise ConfigError(
                f"{self._at(node)}: there are over {_MOST_VALUES:,} values, aliases counted each "
                f"time. Leave out aliases that stand within aliases."
            )
        below = (*above, id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path, below)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return tuple(self.value(item, path, below) for item in node.value)
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALAR_TAGS:
            return self._scalar(node)
        raise ConfigError(f"{self._at(node)}: the tag {node.tag!r} is not read. Leave it out.")

    def _mapping(self, node: yaml.MappingNode, path: Path, above: tuple[int, ...]) -> object:
        values: dict[str, object] = {}
        lines: dict[str, str] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{self._at(key_node)}: a key must be plain text.")
            key = key_node.value
            at = self._at(key_node)
            if key == "<<" and key_node.style is None:  # in quotes it is a key
                raise ConfigError(f"{at}: merge keys (`<<`) are not read. Write the keys out.")
            if key in values:
                raise ConfigError(
                    f"{at}: the key {'.'.join((*path, key))} is written a second time; it was "
                    f"first written at {lines[key]}. Remove one of them."
                )
            lines[key] = self.origins[(*path, key)] = at
            values[key] = self.value(value_node, (*path, key), above)
        return values

    def _scalar(self, node: yaml.ScalarNode) -> object:
        try:
            return self.loader.construct_object(node)
        except (ValueError, KeyError) as error:  # such as `!!int x`
            raise ConfigError(f"{self._at(node)}: {node.value!r} is not a {node.tag}.") from error

    def _at(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"


_SCALAR_TAGS = {_TAG + name for name in ("null", "bool", "int", "float", "str")}


def _syntax_message(error: yaml.MarkedYAMLError, name: str) -> str:
    mark, place, snippet = error.problem_mark or error.context_mark, name, None
    if mark is not None:
        place = f"{name}:{mark.line + 1}:{mark.column + 1}"
        text, at = mark.buffer or "", mark.pointer
        line = text[text.rfind("\n", 0, at) + 1 :].partition("\n")[0]
        # Of a line with a URL, a snippet may show a piece.
        snippet = None if "://" in line else mark.get_snippet(indent=6)
    what = ", ".join(part for part in (error.context, error.problem) if part)
    return f"{place}: this is not YAML: {what}." + (f"\n{snippet}" if snippet else "")


def _kind(value: object) -> str:
    return "a list" if isinstance(value, tuple) else f"the single value {mask_urls(repr(value))}"
