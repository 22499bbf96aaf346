"""Rows that a library of tasks generates: https://github.com/open-thought/reasoning-gym.

A child process generates them (generator.py). Some tasks draw from Python's sets, whose order
differs between processes unless PYTHONHASHSEED is set. With it, the same settings give the same
rows in every run, and in a run that is resumed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from typing import Any

from plimsoll.config.data import GenerateConfig, SourceConfig
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


def open_generator(setup: dict[str, Any]) -> Any:
    """Return the child's function: it takes an index and returns a row of each task."""
    from plimsoll.data.generator import rows_at  # the library takes seconds

    return rows_at(setup)
