"""A job's keys as help text, and a config as YAML."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Sequence

from plimsoll.config.base import Settings
from plimsoll.config.keys import Key, keys_of
from plimsoll.config.yaml_tree import write_tree
from plimsoll.errors import ConfigError


def describe_keys(model: type[Settings], section: str = "", width: int = 100) -> str:
    """Every key of a job with its type, default and meaning, one paragraph each.

    section: only keys at or below this dotted name, such as `actor.zero`.
    Raises ConfigError for a section that does not exist.
    """
    keys = tuple(keys_of(model))
    path = tuple(section.split(".")) if section else ()
    chosen = [key for key in keys if key.path[: len(path)] == path]
    if not chosen:
        close = difflib.get_close_matches(section, [key.name for key in keys], n=1)
        raise ConfigError(
            f"There is no key or section {section!r} to show help for. "
            + (f"Nearest: {close[0]}." if close else f"Sections: {_top(keys)}.")
        )
    return "\n".join(_paragraph(key, width) for key in chosen)


def dump_config(config: Settings) -> str:
    """The config as YAML, every default written out, in the order of the models' fields.

    Loading it gives an equal config.
    """
    return write_tree(config.model_dump(mode="json"))


def _paragraph(key: Key, width: int) -> str:
    if key.section:
        head = f"\n{key.name}:" if len(key.path) == 1 else f"{key.name}:"
    else:
        default = "required" if key.required else f"default {key.default}" if key.default else ""
        head = f"  --{key.name}"
        kind = f"[{'; '.join(part for part in (key.kind, default) if part)}]"
        head += f"  {kind}" if len(head) + 2 + len(kind) <= width else f"\n      {kind}"
    indent = " " * (2 if key.section else 6)
    return "\n".join(
        [head, textwrap.fill(key.doc, width, initial_indent=indent, subsequent_indent=indent)]
    )


def _top(keys: Sequence[Key]) -> str:
    return ", ".join(key.name for key in keys if len(key.path) == 1)
