"""A process that generates rows of reasoning-gym's tasks; generated.py starts it.

Consumes: one JSON object on standard input, {tasks: {name: options}, size, seed}.
Waits for: nothing else.
Produces: JSON objects on standard output, one a line: {values} for each row, {task, problem} for a
row that a task could not generate, or a single {refused} if a task or an option cannot be used.
Ends: after the last row.
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
"""Names that are no tasks of their own: `composite` mixes tasks, as our setting `tasks` does."""
_SEED_DISTANCE = 2**20
"""Distance between the library's seeds for two seeds of ours. The library's row i of seed s equals
its row i - 1 of seed s + 1.
"""


class _Refused(Exception):
    """A task or an option that cannot be used; its text says why."""


def generate_rows(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages that answer a request."""
    size, seed = request["size"], request["seed"]
    try:
        tasks = [(n, o, _dataset(n, o, max(size, 1), seed)) for n, o in request["tasks"].items()]
    except _Refused as error:
        yield {"refused": str(error)}
        return
    for index in range(size):
        for name, options, dataset in tasks:
            try:
                yield {"values": _values(name, options, dataset[index])}
            except Exception as error:  # noqa: BLE001  a task may raise anything
                yield {"task": name, "problem": f"raised {type(error).__name__}: {error}"}


def _dataset(name: str, options: Mapping[str, Any], size: int, seed: int) -> Any:
    names = [task for task in DATASETS if task not in _NO_TASK]
    if name not in names:
        raise _Refused(f"There is no task {name!r}.{_nearest(name, names)}")
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in _SET_BY_REQUEST]
    for option in options:
        if option not in known:
            near = _nearest(option, known) or f" Its options: {', '.join(known)}."
            raise _Refused(f"The task {name!r} has no option {option!r}.{near}")
    try:
        return create_dataset(name, **options, size=size, seed=seed * _SEED_DISTANCE)
    except Exception as error:
        why = str(error) or type(error).__name__
        raise _Refused(f"The task {name!r} does not take its options: {why}.") from error


_SET_BY_REQUEST = ("size", "seed")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, [*known], n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


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


def main() -> None:
    """Answer the request on standard input. Whatever tasks print goes to standard error."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for message in generate_rows(json.load(sys.stdin)):
        output.write(json.dumps(message) + "\n")
    output.flush()


if __name__ == "__main__":
    main()
