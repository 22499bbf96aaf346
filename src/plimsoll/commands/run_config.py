"""Load the config of a run directory, which may be somebody else's.

A config of one's own is trusted. A run directory is not: its config can name functions, which would
be imported as soon as the config is checked, and variables that hold keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plimsoll.config.files import loading_only
from plimsoll.config.load import KEY, leaves, read_tree_of
from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import FLAG, Path, Tree
from plimsoll.errors import ConfigError
from plimsoll.jobs.which import load_any
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.rl.presets import PRESETS
from plimsoll.run.directory import RunDirectory

TRUST = "--trust-run"
"""The flag that allows what the config of a run names."""
_IMPORTED = re.compile(r"(?s).*\.py(?::.*)?|[^\s/:][^/:]*:(?!\d[\d:]*\Z)[^\s/].*")
"""A function by its module or file, a file of Python, or an environment of another package.

Texts such as `Question: ...` are none; what is none of these and would be loaded is refused then.
"""
_RUNNING = {"command", "reasoning_gym"}
"""Names of environments and rewards that run what a config or a policy says, without a sandbox."""
_ARGUMENTS = ("rollout", "vllm", "arguments")


def load_run(run: RunDirectory, flags: Sequence[str], *, trusted: bool) -> RunSpec[Any]:
    """Return the spec of a run's config, changed by flags.

    Raises the errors of `load_any`, and ConfigError if the config names code and is not `trusted`.
    """
    path = str(run.config_path)
    if trusted:
        return load_any(path, flags)
    tree = read_tree_of(path, flags)
    refuse_code(path, tree)
    by_flags = {v for at, v in _every_value(tree.values, ()) if _is_of_flag(tree, at)}
    with loading_only({value for value in by_flags if isinstance(value, str)}):
        return load_any(path, flags)


def refuse_code(path: str, tree: Tree) -> None:
    """Raise ConfigError if values of a run's config name code or keys; values of flags may.

    `path` is the path of the config. Nothing is imported.
    """
    if named := list(_named_code(tree)):
        lines = "".join(f"\n  {line}" for line in named)
        raise ConfigError(
            f"{path} names code that would run as you, or keys and machines of yours that it would "
            f"use:{lines}\nA run directory may be of somebody else. If you trust whoever wrote it, "
            f"add {TRUST}; or replace these keys by flags."
        )


def _named_code(tree: Tree) -> Iterator[str]:
    """Yield `key: value` for each value that is not a flag's and names code, keys or machines."""
    for path, value in _every_value(tree.values, ()):
        if _is_code(path, value) and not _is_of_flag(tree, path):
            yield f"{'.'.join(path)}: {show(value)}"


def _is_of_flag(tree: Tree, path: Path) -> bool:
    above = (tree.origins.get(path[:length], "") for length in range(1, len(path) + 1))
    return any(at.startswith(FLAG) for at in above)


def _every_value(values: Mapping[str, Any], above: Path) -> Iterator[tuple[Path, object]]:
    """Yield each single value with its path; the values of a list have the list's path."""
    for path, value in leaves(values, above).items():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Mapping):
                yield from _every_value(item, path)
            elif isinstance(item, tuple):
                yield from _every_value({path[-1]: item}, path[:-1])
            else:
                yield path, item


def _is_code(path: Path, value: object) -> bool:
    last = path[-1]
    if not isinstance(value, str):
        return last == "trust_remote_code" and value is True
    if path == (KEY,):
        return value not in PRESETS  # a file, whose values are not in the tree
    if path[: len(_ARGUMENTS)] == _ARGUMENTS:
        return not value.isidentifier()
    by_key = last == "api_key" or path == ("cluster", "address")
    by_value = (last == "name" and value in _RUNNING) or (last == "sandbox" and value == "none")
    return by_key or by_value or _IMPORTED.fullmatch(value) is not None
