"""Rows that a library of tasks generates: https://github.com/open-thought/reasoning-gym.

A child process generates them. Some tasks draw from Python's sets, whose order
differs between processes unless PYTHONHASHSEED is set. With it, the same settings give the same
rows in every run, and in a run that is resumed.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import fields
from itertools import count
from typing import Any

from plimsoll.config.data import GenerateConfig, SourceConfig
from plimsoll.config.files import nearest
from plimsoll.config.problems import Problem, Section
from plimsoll.data.fields import BadRow, RawRow
from plimsoll.errors import ConfigError
from plimsoll.process.child import ChildEnded, Pool, Program, our_environment

LIBRARY = "reasoning_gym"
COLUMNS = ("question", "answer", "task", LIBRARY)
"""The columns of every row: `question` and `answer` are texts, `task` is the task's name, and
`reasoning_gym` is the value by which the library scores.
"""
INSTALL = "pip install 'reasoning-gym>=0.1.25,<0.2'"
_ROW_SECONDS = 1e6  # some tasks search for long
_NO_TASK = ("composite",)
"""Names that are no tasks of their own: `composite` mixes tasks, as our setting `tasks` does."""
_SEED_DISTANCE = 2**20
"""Distance between the library's seeds for two seeds of ours. The library's row i of seed s equals
its row i - 1 of seed s + 1.
"""


GeneratedEntry = dict[str, Any]
"""{"values": ...}, a row; or {"task": ..., "problem": ...} if a task could not generate its row."""
_SET_BY_SETUP = ("size", "seed")


def check_generated(key: str, source: SourceConfig) -> Iterator[Problem]:
    """Yield the problems of a source that has `generate`, before the library generates anything.

    Args:
        key: the key of the source in the config.
        source: the settings of the source.
    """
    at, generate = Section(key, source), source.generate
    assert generate is not None
    for name, default in (("name", None), ("split", "train")):
        if getattr(source, name) != default:
            yield at.invalid(name, "Generated rows have none.", f"leave {key}.{name} out")
    if source.path != LIBRARY:
        why = f"{key}.generate has a library generate rows, and {LIBRARY} is the one that can."
        yield at.invalid("path", why, f"{key}.path: {LIBRARY}, or leave {key}.generate out")
    elif importlib.util.find_spec(LIBRARY) is None:
        why = "The package reasoning-gym is not installed."
        yield at.invalid("path", why, f"`{INSTALL}`", "package-missing")
    elif not generate.options():
        yield at.invalid("generate.tasks", "There is none.", "name one or more: [chain_sum]")
    elif refusal := _refusal(generate):
        fix = "correct the name or the options: "
        fix += "https://github.com/open-thought/reasoning-gym/blob/main/GALLERY.md shows them"
        yield at.invalid("generate.tasks", refusal, fix)


def generated_rows(source: SourceConfig) -> Iterator[RawRow | BadRow]:
    """Yield rows of all tasks, one of each task in turn.

    An item that a task fails to generate gives a bad row.

    Raises:
        ConfigError: a task or an option cannot be used.
    """
    assert source.generate is not None
    lines = count(1)
    with closing(_process(source.generate)) as process:
        for index in range(source.generate.size):
            try:
                entries = process.ask(index, _ROW_SECONDS)
            except ChildEnded as ended:
                said = f"{LIBRARY} {ended} while it generated rows.\n{ended.lines}"
                raise ConfigError(said.rstrip()) from ended
            for entry in entries:
                yield _row(source.path, next(lines), entry)


def _row(path: str, line: int, entry: dict[str, Any]) -> RawRow | BadRow:
    if "values" in entry:
        return RawRow(path, line, entry["values"])
    return BadRow(path, line, entry["task"], entry["problem"])


def _refusal(generate: GenerateConfig) -> str:
    """Return the library's error about the tasks or their options; "" if it accepts them."""
    with closing(_process(generate.model_copy(update={"size": 1}))) as process:
        try:
            process.take()
        except ConfigError as error:
            return str(error)
    return ""


def _process(generate: GenerateConfig) -> Pool:
    """Return the process that generates the rows of an index."""
    program = Program(
        open_generator,
        what=f"The process for rows of {LIBRARY}",
        setup={"tasks": generate.options(), "size": generate.size, "seed": generate.seed},
        environment=our_environment() | {"PYTHONHASHSEED": "0"},
    )
    return Pool(program, 1)


def open_generator(setup: Mapping[str, Any]) -> Callable[[int], list[GeneratedEntry]]:
    """Return the child's function: it takes an index and generates the row there of each task.

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
    from reasoning_gym.factory import DATASETS, create_dataset  # takes seconds

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
