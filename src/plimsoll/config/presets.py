"""Named sets of values over which a config's own are laid."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from plimsoll.config.load import read_config_text
from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import Path, Tree, read_tree, value_at
from plimsoll.errors import ConfigError

KEY = "preset"
"""The key of a preset's name, at the top of a config."""

VARIANT, PAPER = "variant", "paper"
"""The key beside it, and the value that asks for what a preset's paper sets."""

Values = Mapping[str, Any]
"""Values by key, nested as in a config file."""

MODEL = "<model>"
"""Stands for the path of the model in the values of a first config."""


@dataclass(frozen=True)
class Preset:
    """A named set of values for a config.

    Attributes:
        name: also the name of its command.
        summary: its line in the help.
        values: what it sets.
        start: what a first config says besides, by dotted key.
        paper: returns what the method's paper sets beside these values or in their place, given a
            config's own; None if there is no other setting.
    """

    name: str
    summary: str
    values: Values
    start: Mapping[str, object] = field(default_factory=dict)
    paper: Callable[[Values], Values] | None = None


def with_preset(tree: Tree, presets: Mapping[str, Preset], command: str | None) -> Tree:
    """Return the tree over the values of the preset that it names, or that the command is.

    Raises:
        ConfigError: there is no preset of that name, or tree and command name two.
    """
    named = tree.values.get(KEY)
    if command is not None and named not in (None, command):
        raise ConfigError(
            f"{KEY}: {named} in the config, and `plimsoll {command}` is a preset itself. Leave "
            f"{KEY} out, or write `plimsoll rl`."
        )
    name = command or named
    if name is None and tree.values.get(VARIANT) == PAPER:
        raise ConfigError(
            f"{VARIANT}: {PAPER} chooses between the values of a preset, and there is none. "
            f"{_with_papers(presets)}"
        )
    if not isinstance(name, str):  # None, or a value that the schema refuses
        return tree
    base = _values(name, presets, tree.values)
    values = _over(base, tree.values) | {KEY: name}
    variant = f", {VARIANT} {PAPER}" if tree.values.get(VARIANT) == PAPER else ""
    written = dict.fromkeys(leaves(base), f"{KEY} {name}{variant}")
    return Tree(values, {**written, **tree.origins})


def render_preset(name: str, presets: Mapping[str, Preset], resolved: Values) -> str:
    """Return what a preset sets, a key a line, and where the resolved config says otherwise."""
    set_here = leaves(_values(name, presets, resolved))
    width = max(len(".".join(path)) for path in set_here)
    lines = [f"Preset {name}" + (f", {VARIANT} {PAPER}" if resolved[VARIANT] == PAPER else "")]
    for path, value in set_here.items():
        resolved_value = value_at(resolved, path)
        same = resolved_value == value or value == {}
        said = "" if same else f"   (overridden: {show(resolved_value)})"
        lines.append(f"  {'.'.join(path):<{width}}  {show(value)}{said}")
    return "\n".join(lines)


def leaves(values: Values, above: Path = ()) -> dict[Path, object]:
    """Return each value that is no section, by its path; an empty section counts as a value."""
    values_by_path: dict[Path, object] = {}
    for name, value in values.items():
        deeper = isinstance(value, Mapping) and value
        values_by_path |= leaves(value, (*above, name)) if deeper else {(*above, name): value}
    return values_by_path


def _values(name: str, presets: Mapping[str, Preset], config: Values) -> Values:
    """Return the values of a preset in the variant that a config asks for, or of one's own file."""
    in_paper = config.get(VARIANT) == PAPER
    if name in presets and not in_paper:
        return presets[name].values
    if name in presets and (paper := presets[name].paper) is not None:
        return _over(presets[name].values, paper(config))
    if name not in presets and not name.endswith((".yaml", ".yml")):
        close = difflib.get_close_matches(name, presets, n=1)
        near = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"There is no preset {name!r}.{near} Presets: {', '.join(presets)}; one of your own is "
            f"a YAML file: {KEY}: my_preset.yaml."
        )
    if in_paper:
        raise ConfigError(
            f"{VARIANT}: {PAPER}, but the preset {name} has no values of a paper beside its own. "
            f"{_with_papers(presets)}"
        )
    values = read_tree(read_config_text(str(FilePath(name).expanduser())), name).values
    for key in (KEY, VARIANT):
        if key in values:
            raise ConfigError(f"{name}: a preset cannot name another. Leave {key} out of it.")
    return values


def _with_papers(presets: Mapping[str, Preset]) -> str:
    names = [preset.name for preset in presets.values() if preset.paper is not None]
    return f"Presets with this variant: {', '.join(names)}. Name one, or leave {VARIANT} out."


def _over(base: Values, values: Values) -> dict[str, Any]:
    """Return the values over those of a base.

    The values' keys come first: of the parts of the reward, the first one counts. A named function
    takes the place of another whole: its options are its own.
    """
    renamed = "name" in values and values["name"] != base.get("name", values["name"])
    if renamed:
        return dict(values)
    merged = dict(values)
    for key, value in base.items():
        new_value = values.get(key)
        if isinstance(value, Mapping) and isinstance(new_value, Mapping):
            merged[key] = _over(value, new_value)
        elif key not in values:
            merged[key] = value
    return merged
