"""Generate rows of reasoning-gym's tasks, in the child process of generated.py."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset

from plimsoll.config.files import nearest
from plimsoll.errors import ConfigError

_NO_TASK = ("composite",)
"""Names that are no tasks of their own: `composite` mixes tasks, as our setting `tasks` does."""
_SEED_DISTANCE = 2**20
"""Distance between the library's seeds for two seeds of ours. The library's row i of seed s equals
its row i - 1 of seed s + 1.
"""


GeneratedEntry = dict[str, Any]
"""{"values": ...}, a row; or {"task": ..., "problem": ...} if a task could not generate its row."""


def rows_at(setup: Mapping[str, Any]) -> Callable[[int], list[GeneratedEntry]]:
    """Return a function that takes an index and generates the row there of each task.

    Args:
        setup: {"tasks": {name: options}, "size": rows of each task, "seed": ...}.

    Raises ConfigError for a task or an option that cannot be used.
    """
    size, seed = setup["size"], setup["seed"]
    datasets = [(n, o, _dataset(n, o, size, seed)) for n, o in setup["tasks"].items()]

    def entries(index: int) -> Iterator[GeneratedEntry]:
        for name, options, dataset in datasets:
            try:
                yield {"values": _values(name, options, dataset[index])}
            except Exception as error:  # noqa: BLE001  a task may raise anything
                yield {"task": name, "problem": f"raised {type(error).__name__}: {error}"}

    return lambda index: [*entries(index)]


def _dataset(name: str, options: Mapping[str, Any], size: int, seed: int) -> Any:
    names = [task for task in DATASETS if task not in _NO_TASK]
    if name not in names:
        raise ConfigError(f"There is no task {name!r}.{nearest(name, names)}")
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in _SET_BY_SETUP]
    for option in options:
        if option not in known:
            near = nearest(option, known) or f" Its options: {', '.join(known)}."
            raise ConfigError(f"The task {name!r} has no option {option!r}.{near}")
    try:
        return create_dataset(name, **options, size=size, seed=seed * _SEED_DISTANCE)
    except Exception as error:
        why = str(error) or type(error).__name__
        raise ConfigError(f"The task {name!r} does not take its options: {why}.") from error


_SET_BY_SETUP = ("size", "seed")


def _values(name: str, options: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's values.

    The entry is kept as Python's `repr`: tasks score by tuples and by numbers as keys, which JSON
    lacks.
    """
    entry_text = repr(_plain(entry))
    ast.literal_eval(entry_text)  # raises if the text could not be read back
    scored_by = {"task": name, "options": dict(options), "entry": entry_text}
    texts = {"question": entry["question"], "answer": str(entry["answer"])}
    return {**texts, "task": name, "reasoning_gym": scored_by}


def _plain(value: Any) -> Any:
    """Replace NumPy's scalars, whose `repr` is a call, by Python's."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.item() if hasattr(value, "dtype") and hasattr(value, "item") else value
