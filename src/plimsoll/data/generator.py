"""A process that generates rows of reasoning-gym's tasks; started by generated.py.

It consumes one JSON object on standard input, {tasks: {name: options}, size, seed}, waits for
nothing else, and writes a JSON object a line on standard output: {values} for each row, or {task,
problem} for one that a task could not generate; or a single {refused}, for a task or an option that
cannot be used. It ends after the last row.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset

_NO_TASK = ("composite",)
"""It mixes others, as `tasks` does."""
_APART = 2**20
"""Between the library's seeds for two of ours: its row i of seed s is row i - 1 of seed s + 1."""


class _Refused(Exception):
    """A task or an option that cannot be used; its text says why."""


def rows(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What is written of a question."""
    size, seed = asked["size"], asked["seed"]
    try:
        opened = [(n, o, _dataset(n, o, max(size, 1), seed)) for n, o in asked["tasks"].items()]
    except _Refused as error:
        yield {"refused": str(error)}
        return
    for index in range(size):
        for name, options, dataset in opened:
            try:
                yield {"values": _values(name, options, dataset[index])}
            except Exception as error:  # noqa: BLE001  a task may do anything
                yield {"task": name, "problem": f"raised {type(error).__name__}: {error}"}


def _dataset(name: str, options: Mapping[str, Any], size: int, seed: int) -> Any:
    names = [own for own in DATASETS if own not in _NO_TASK]
    if name not in names:
        raise _Refused(f"There is no task {name!r}.{_nearest(name, names)}")
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in _OWN]
    for option in options:
        if option not in known:
            near = _nearest(option, known) or f" Its options: {', '.join(known)}."
            raise _Refused(f"The task {name!r} has no option {option!r}.{near}")
    try:
        return create_dataset(name, **options, size=size, seed=seed * _APART)
    except Exception as error:
        said = str(error) or type(error).__name__
        raise _Refused(f"The task {name!r} does not take its options: {said}.") from error


_OWN = ("size", "seed")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, [*known], n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _values(name: str, options: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """The row of an entry. Its whole is kept as Python writes it: tasks score by tuples and by
    numbers as keys, which JSON has not."""
    whole = repr(_plain(entry))
    ast.literal_eval(whole)  # raises for what could not be read back
    scored_by = {"task": name, "options": dict(options), "entry": whole}
    texts = {"question": entry["question"], "answer": str(entry["answer"])}
    return {**texts, "task": name, "reasoning_gym": scored_by}


def _plain(value: Any) -> Any:
    """Without the scalars of NumPy, which Python writes as calls."""
    if isinstance(value, dict):
        return {_plain(key): _plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.item() if hasattr(value, "dtype") and hasattr(value, "item") else value


def main() -> None:
    """Answer the one question on standard input; what is printed goes to standard error."""
    written = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for message in rows(json.load(sys.stdin)):
        written.write(json.dumps(message) + "\n")
    written.flush()


if __name__ == "__main__":
    main()
