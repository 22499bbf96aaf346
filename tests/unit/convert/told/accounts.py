"""What tests ask of a command of another trainer that was converted."""

from __future__ import annotations

from pathlib import Path

from plimsoll.config.yaml_tree import read_tree, value_at
from plimsoll.convert.apply import FORGOTTEN
from plimsoll.convert.result import Converted
from plimsoll.convert.shown import config_text, table_text
from plimsoll.jobs import JOBS
from plimsoll.spec.load import load_spec


def at(found: Converted, key: str) -> object:
    return value_at(found.values, key.split("."))


def why(found: Converted, kind: str, about: str) -> str:
    return next(one.why for one in found.remarks if (one.kind, one.about) == (kind, about))


def plain(value: object) -> object:
    """With 1 and 1.0 alike, and lists as tuples."""
    if isinstance(value, dict):
        return {key: plain(held) for key, held in value.items()}
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


def accounted(found: Converted) -> set[str]:
    """The settings that something is told of."""
    entries = {flag for entry in found.entries for flag in entry.flags}
    return entries | {one.about for one in found.remarks if one.why != FORGOTTEN}


def check_told_and_loaded(found: Converted, name: str, folder: Path) -> str:
    """Every setting that was given is told of, and the config says the same as a file, which its
    job takes. Returns the config's text."""
    assert found.typed - accounted(found) == set()
    text, table = config_text(found), table_text(found, width=10**6)
    for setting in found.typed:
        assert found.shown[setting] in table
    assert plain(read_tree(text, name).values) == plain(found.values)
    file = folder / "config.yaml"
    file.write_text(text)
    assert load_spec(JOBS[found.job], str(file)).job.name == found.job
    return text
