"""What a run that goes on has been told otherwise than before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import read_tree

_OF_EVERY_RESUME = ("run.resume", "run.edited_rows")
_MISSING = object()


def changed_settings(before: str, now: str) -> list[str]:
    """The keys of two resolved configs that differ, as `key: old -> new`, in the new one's order.

    before, now: YAML, as `dump_config` writes it.
    """
    old, new = (dict(_leaves(read_tree(text, "config.yaml").values)) for text in (before, now))
    keys = [*new, *(key for key in old if key not in new)]
    return [
        f"{key}: {_text(old, key)} -> {_text(new, key)}"
        for key in keys
        if key not in _OF_EVERY_RESUME and old.get(key, _MISSING) != new.get(key, _MISSING)
    ]


def _leaves(tree: Any, above: str = "") -> Iterator[tuple[str, object]]:
    if not isinstance(tree, Mapping) or not tree:
        yield above, tree
        return
    for name, value in tree.items():
        yield from _leaves(value, f"{above}.{name}" if above else str(name))


def _text(leaves: Mapping[str, object], key: str) -> str:
    return show(leaves[key]) if key in leaves else "not given"
