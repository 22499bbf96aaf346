"""What tests ask of a converted command."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from plimsoll.config.keys import find_key, keys_of
from plimsoll.config.yaml_tree import read_tree, value_at
from plimsoll.jobs import JOBS
from plimsoll.resolve.load import load_spec
from plimsoll_convert.openrlhf import RELEASES
from plimsoll_convert.openrlhf.table import FLAGS, VersionedFlag
from plimsoll_convert.settings import Setting
from plimsoll_convert.writer import Converted, config_text, table_text

_KEYS = tuple(key for job in JOBS.values() for key in keys_of(job.config))


def at(converted: Converted, key: str) -> object:
    """Return the value of a key, or None."""
    return value_at(converted.values, key.split("."))


def about(converted: Converted, kind: str) -> set[str]:
    """Return what the remarks of a kind are about."""
    return {remark.about for remark in converted.remarks if remark.kind == kind}


def plain(value: object) -> object:
    """Return the value with 1 and 1.0 alike, and lists as tuples."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


def check_complete(converted: Converted) -> str:
    """Assert that the table shows every setting that was given, and that the config says the same
    as a file. Return the config's text."""
    text, table = config_text(converted), table_text(converted, width=10**6)
    for setting in converted.typed:
        assert converted.shown[setting] in table
    assert plain(read_tree(text, "config").values) == plain(converted.values)
    return text


def check_loads(converted: Converted, folder: Path) -> None:
    """Assert that the job takes the config as a file."""
    file = folder / "config.yaml"
    file.write_text(check_complete(converted))
    assert load_spec(JOBS[converted.job], str(file)).job.name == converted.job


@cache
def known_flags(command: str) -> tuple[VersionedFlag, ...]:
    """Return OpenRLHF's flags that a command has in any version, in the table's order."""
    return tuple(flag for flag in FLAGS if any(flag.name(command, v) for v in RELEASES))


def unread(settings: Collection[Setting], package: str, tables: Sequence[str]) -> list[str]:
    """Return the settings with a counterpart that no converter asks for, and the keys that the
    table names for settings and that no job has."""
    folder = Path(import_module(package).__path__[0])
    files = [path for path in folder.glob("*.py") if path.name not in tables]
    text = "\n".join(path.read_text() for path in files)
    names = {s.name: s.name for s in settings if s.absent is None and not s.keys}
    for role in ("actor", "critic"):
        names = {id: name.removeprefix(f"{role}_") for id, name in names.items()}
    keys = [re.split(r"[=[]", key)[0] for s in settings for key in filter(None, s.keys.split("+"))]
    missing = [key for key in keys if find_key(_KEYS, tuple(key.split("."))) is None]
    return [id for id, name in names.items() if name.rpartition(".")[2] not in text] + missing
