"""Make a checked config from a YAML file and dotted flags, without torch.

Every wrong, unknown and missing key is named in one error. Relative paths in a config are
relative to the current directory, not to the file that names them. A config may have a
preset: a named set of values, which those of the config override.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, TypeVar

from pydantic import ValidationError

from plimsoll.config.base import Settings
from plimsoll.config.flags import apply_flags, parse_flags
from plimsoll.config.keys import ANY, Key, below, find_key, keys_of
from plimsoll.config.problems import Problem, invalid, refuse, show
from plimsoll.config.yaml_tree import Path, Tree, nearest_origin, read_tree, value_at
from plimsoll.errors import ConfigError

SettingsT = TypeVar("SettingsT", bound=Settings)


def read_tree_of(path: str, flags: Sequence[str]) -> Tree:
    """Return the values of a config file, overridden by those of the flags, unchecked.

    `flags` are arguments such as `["--run.steps", "10"]`.
    """
    return apply_flags(read_tree(read_config_text(path), path), parse_flags(flags))


def validate(model: type[SettingsT], tree: Tree) -> SettingsT:
    """Return the config, such as an SftConfig, that holds a tree of values.

    Agreement between keys is not checked.

    Raises:
        ConfigError: (exit code 2) some keys are wrong; the message lists all of them.
    """
    refuse(schema_problems(model, tree))
    return model.model_validate(tree.values)


def schema_problems(model: type[Settings], tree: Tree) -> Iterator[Problem]:
    """Yield every key that is wrong, unknown or missing; agreement between keys is not checked."""
    keys = tuple(keys_of(model))
    yield from _bools_as_numbers(keys, tree)
    try:
        model.model_validate(tree.values)
    except ValidationError as error:
        yield from _in_plain_words(error, keys, tree)


def read_config_text(path: str) -> str:
    """Return the file's text.

    Raises:
        ConfigError: the file cannot be read, or has characters that no file name can have here.
    """
    try:
        text = FilePath(path).read_text(encoding="utf-8")
        text.encode(sys.getfilesystemencoding())
        return text
    except FileNotFoundError as error:
        folder = FilePath(path).parent
        names = sorted(p.name for p in folder.glob("*.y*ml")) if folder.is_dir() else []
        close = difflib.get_close_matches(FilePath(path).name, names, n=1)
        near = f"Nearest: {folder / close[0]}." if close else "Check the path."
        raise ConfigError(f"{path}: there is no such config file. {near}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{path} holds {text[error.start]!r}, which {error.encoding} lacks, the encoding of "
            f"names of files in this locale. Run Plimsoll with PYTHONUTF8=1, or in a UTF-8 locale "
            f"such as LC_ALL=C.UTF-8."
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Give a YAML file.") from error


def _in_plain_words(error: ValidationError, keys: tuple[Key, ...], tree: Tree) -> Iterator[Problem]:
    """Yield one problem per key, in plain words.

    Pydantic reports each branch of a union by itself.
    """
    seen: set[Path] = set()
    for detail in error.errors(include_url=False, include_context=False):
        # `<...>` is no key: it says which form of a section was taken
        location = tuple(part for part in map(str, detail["loc"]) if part[:1] != "<")
        if detail["type"] == "missing":
            yield from _missing(location, keys, tree)
        elif detail["type"] == "extra_forbidden":
            yield _unknown(location, detail["input"], keys, tree)
        else:
            key, path = _innermost(keys, location)
            if path not in seen:
                yield _wrong(key, path, keys, tree)
            seen.add(path)


def _missing(path: Path, keys: tuple[Key, ...], tree: Tree) -> Iterator[Problem]:
    """Yield a missing key; for a missing section, each key that is required within it."""
    key, _ = _innermost(keys, path)
    required = [child for child in below(keys, path) if key.section and child.required]
    if not required:
        instead = "give at least one entry below it" if key.section else f"write {key.kind}"
        instead = f"{_meant(key, path, tree)}{instead}; it has no default"
        yield invalid(".".join(path), None, f"Missing: {key.doc}", instead)
    for child in required:
        yield from _missing((*path, child.path[-1]), keys, tree)


def _meant(key: Key, path: Path, tree: Tree) -> str:
    """Return a hint if a key is missing under a user's name and a similar name has it; else ""."""
    if key.path[-2:-1] != (ANY,):
        return ""
    *section, name, last = path
    written = value_at(tree.values, tuple(section))
    entries = written if isinstance(written, dict) else {}
    whole = [str(n) for n, entry in entries.items() if isinstance(entry, dict) and last in entry]
    close = difflib.get_close_matches(name, whole, n=1)
    return f"did you mean {'.'.join((*section, *close))}? Otherwise " if close else ""


def _unknown(path: Path, value: object, keys: tuple[Key, ...], tree: Tree) -> Problem:
    section = path[:-1]
    known = [key.path[-1] for key in below(keys, section) if key.path[-1] != ANY]
    elsewhere = [key.name for key in keys if key.path[-len(path) :] == path]
    close = difflib.get_close_matches(path[-1], known, n=1)
    if isinstance(value, dict) and find_key(keys, path) is not None:
        instead = f"put all keys of {'.'.join(section)} below names, as this one, or none of them"
    elif close:
        instead = f"did you mean {'.'.join((*section, close[0]))}?"
    elif elsewhere:
        instead = f"did you mean {' or '.join(elsewhere[:4])}?"
    else:
        instead = f"valid keys here: {', '.join(known)}"
    name = ".".join(path)
    return invalid(
        name, show(value), "There is no such key.", instead, nearest_origin(tree.origins, path)
    )


def _wrong(key: Key, path: Path, keys: tuple[Key, ...], tree: Tree) -> Problem:
    value = value_at(tree.values, path)
    if key.section:
        why, instead = "A section is needed here.", "write keys with values below it"
        instead += _such_as(path, value, keys)
    else:
        close = difflib.get_close_matches(str(value), map(str, key.choices), n=1)
        why = f"It must be: {key.kind}."
        default = f", or leave it out (default {key.default})" if key.default else ""
        instead = f"did you mean {close[0]}?" if close else f"write such a value{default}"
    if key.kind.startswith("text") and isinstance(value, bool | int | float):
        instead = f'write it in quotes: "{show(value)}" (on a command line: \'"{show(value)}"\')'
    return invalid(".".join(path), show(value), why, instead, nearest_origin(tree.origins, path))


def _such_as(section: Path, value: object, keys: tuple[Key, ...]) -> str:
    """Return a hint for text in the place of a section: the key that it was meant for.

    It is empty unless the section has a `path` or `name` that stands for all of it.
    """
    names = [key.path[-1] for key in below(keys, section)]
    meant = next((name for name in ("path", "name") if name in names), None)
    if meant is None or not isinstance(value, str):
        return ""
    return f", such as {'.'.join((*section, meant))}: {show(value)}"


def _bools_as_numbers(keys: tuple[Key, ...], tree: Tree) -> Iterator[Problem]:
    """Yield a problem for each boolean where only certain numbers are allowed.

    Python and pydantic take `true` for 1.
    """
    for key in keys:
        value = value_at(tree.values, key.path)
        if isinstance(value, bool) and value in key.choices:
            yield _wrong(key, key.path, keys, tree)


def _innermost(keys: tuple[Key, ...], path: Path) -> tuple[Key, Path]:
    """Return the innermost key that `path` is or lies in, and that key's path.

    Pydantic adds list indices and union branches to paths.
    """
    for length in range(len(path), 0, -1):
        key = find_key(keys, path[:length])
        if key is not None:
            return key, path[:length]
    raise AssertionError(f"{path} lies in no key")


KEY = "preset"
"""The key of a preset's name, at the top of a config."""

VARIANT, PAPER = "variant", "paper"
"""The key of a preset's variant, and its value for the settings of the preset's paper."""

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
        values: the values that it sets.
        start: further values for a first config, by dotted key.
        paper: takes a config's values and returns those of the method's paper, which override
            `values`; None if there are no others.
    """

    name: str
    summary: str
    values: Values
    start: Mapping[str, object] = field(default_factory=dict)
    paper: Callable[[Values], Values] | None = None


def with_preset(tree: Tree, presets: Mapping[str, Preset], command: str | None) -> Tree:
    """Return the tree, with a preset's values for the keys that the tree does not set.

    The preset is the one that the tree names, or the command itself.

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
    return Tree(values, {**dict.fromkeys(leaves(base), f"{KEY} {name}{variant}"), **tree.origins})


def render_preset(name: str, presets: Mapping[str, Preset], resolved: Values) -> str:
    """Return the keys that a preset sets, one a line, each marked if the config overrides it."""
    set_here = leaves(_values(name, presets, resolved))
    width = max(len(".".join(path)) for path in set_here)
    lines = [f"Preset {name}" + (f", {VARIANT} {PAPER}" if resolved[VARIANT] == PAPER else "")]
    for path, value in set_here.items():
        resolved_value = value_at(resolved, path)
        # A preset says "none" for a section that is not there: null in a config that is read.
        same = resolved_value == value or value == {} or (value, resolved_value) == ("none", None)
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
    """Return the values of a preset, or a preset file, in the variant that the config sets."""
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
    """Return `base` with `values` in it, which replace the base's values at all levels.

    Keys of `values` come first, because the first of the reward's parts counts. A function of
    another name replaces the base's with all its options.
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
