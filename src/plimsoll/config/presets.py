"""Named sets of values that a config's own are laid over."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from plimsoll.config.load import read_config_text
from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import Path, Tree, read_tree, value_at
from plimsoll.errors import ConfigError

KEY = "preset"
"""Of a config, at its top."""

Values = Mapping[str, Any]
"""Of keys, nested as in a config file."""

MODEL = "<model>"
"""Stands for the path of the model in the values of a first config."""


@dataclass(frozen=True)
class Preset:
    """name: also of its command. summary: its line in the help. start: what a first config says
    besides, by dotted key."""

    name: str
    summary: str
    values: Values
    start: Mapping[str, object] = field(default_factory=dict)


def with_preset(tree: Tree, presets: Mapping[str, Preset], command: str | None) -> Tree:
    """The tree over the values of the preset that it names, or that the command is.

    Raises ConfigError where there is none of that name, and where tree and command name two.
    """
    named = tree.values.get(KEY)
    if command is not None and named not in (None, command):
        raise ConfigError(
            f"{KEY}: {named} in the config, and `plimsoll {command}` is a preset itself. Leave "
            f"{KEY} out, or write `plimsoll rl`."
        )
    name = command or named
    if not isinstance(name, str):  # None, or what the schema refuses
        return tree
    base = _values(name, presets)
    values = _over(base, tree.values) | {KEY: name}
    written = dict.fromkeys(leaves(base), f"{KEY} {name}")
    return Tree(values, {**written, **tree.origins})


def shown(name: str, presets: Mapping[str, Preset], resolved: Values) -> str:
    """What a preset sets, a key a line, and what stands there where the config says otherwise."""
    set_here = leaves(_values(name, presets))
    width = max(len(".".join(path)) for path in set_here)
    lines = [f"Preset {name}"]
    for path, value in set_here.items():
        found = value_at(resolved, path)
        same = found == value or value == {}
        said = "" if same else f"   (overridden: {show(found)})"
        lines.append(f"  {'.'.join(path):<{width}}  {show(value)}{said}")
    return "\n".join(lines)


def leaves(values: Values, above: Path = ()) -> dict[Path, object]:
    """Each value that is no section, by its path; an empty section counts as a value."""
    found: dict[Path, object] = {}
    for name, value in values.items():
        deeper = isinstance(value, Mapping) and value
        found |= leaves(value, (*above, name)) if deeper else {(*above, name): value}
    return found


def _values(name: str, presets: Mapping[str, Preset]) -> Values:
    """Of a preset, or of a file of one's own."""
    if name in presets:
        return presets[name].values
    if not name.endswith((".yaml", ".yml")):
        close = difflib.get_close_matches(name, presets, n=1)
        near = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"There is no preset {name!r}.{near} Presets: {', '.join(presets)}; one of your own is "
            f"a YAML file: {KEY}: my_preset.yaml."
        )
    values = read_tree(read_config_text(str(FilePath(name).expanduser())), name).values
    if KEY in values:
        raise ConfigError(f"{name}: a preset cannot name another. Leave {KEY} out of it.")
    return values


def _over(base: Values, values: Values) -> dict[str, Any]:
    """A named function takes the place of another whole: its options are its own."""
    renamed = "name" in values and values["name"] != base.get("name", values["name"])
    if renamed:
        return dict(values)
    merged = dict(base)
    for key, value in values.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = _over(below, value) if both else value  # type: ignore[arg-type]
    return merged
