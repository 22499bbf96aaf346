"""Rows that a library of tasks generates: reasoning-gym's, https://github.com/open-thought/reasoning-gym.

A child process generates them (generator.py). Some of its tasks draw from Python's sets, whose
order is another in each process unless PYTHONHASHSEED says otherwise: with it the same settings
give the same rows in every run, and in one that goes on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from plimsoll.config.data import GenerateConfig, SourceConfig
from plimsoll.config.problems import Problem, Section
from plimsoll.data.report import BadRow, Row
from plimsoll.errors import ConfigError
from plimsoll.process.child import Child, ChildEnded, ChildRefused, Program, our_environment

LIBRARY = "reasoning_gym"
COLUMNS = ("question", "answer", "task", LIBRARY)
"""The columns of generated rows: texts; the task's name; what the task's reward scores by."""
INSTALL = "pip install 'reasoning-gym>=0.1.25,<0.2'"
_ROW_SECONDS = 3600.0  # some tasks search


def check_generated(key: str, source: SourceConfig) -> Iterator[Problem]:
    """Yield what is wrong with a source that has `generate`, before anything is generated.

    Args:
        key: The source's key in the config.
        source: The source.
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


def generated_rows(source: SourceConfig) -> Iterator[Row | BadRow]:
    """Yield rows of all tasks, one of each in turn.

    A row that a task fails to generate is a bad row. Raises ConfigError for a task or an option
    that cannot be used.
    """
    assert source.generate is not None
    lines = count(1)
    try:
        with _generator(source.generate) as child:
            for index in range(source.generate.size):
                for entry in child.ask(index, _ROW_SECONDS):
                    yield _row(source.path, next(lines), entry)
    except ChildRefused as refused:
        raise ConfigError(f"{LIBRARY}: {refused}") from refused
    except ChildEnded as ended:
        said = f"{LIBRARY} {ended} while it generated rows.\n{ended.lines}"
        raise ConfigError(said.rstrip()) from ended
    except TimeoutError as error:
        raise ConfigError(f"{LIBRARY} took over {_ROW_SECONDS:g} s for one row.") from error


def _row(path: str, line: int, entry: dict[str, Any]) -> Row | BadRow:
    if "values" in entry:
        return Row(path, line, entry["values"])
    return BadRow(path, line, entry["task"], entry["problem"])


def _refusal(generate: GenerateConfig) -> str:
    """Return what the library says of tasks and options that it does not take; "" if it does."""
    try:
        with _generator(generate.model_copy(update={"size": 1})):
            return ""
    except ChildRefused as refused:
        return str(refused)


@contextmanager
def _generator(generate: GenerateConfig) -> Iterator[Child]:
    """Yield a child that generates the rows of an index, and end it.

    Raises ChildRefused for a task or an option that cannot be used, and ChildEnded.
    """
    setup = {"tasks": generate.options(), "size": generate.size, "seed": generate.seed}
    what, environment = f"The process for rows of {LIBRARY}", our_environment()
    program = Program(
        open_generator, what, setup, environment=environment | {"PYTHONHASHSEED": "0"}
    )
    child = Child(program)
    try:
        child.open()
        yield child
    finally:
        child.end()


def open_generator(setup: dict[str, Any]) -> Any:
    """Return what answers in the child: an index to the rows there, one of each task."""
    from plimsoll.data.generator import rows_at  # the library takes seconds

    return rows_at(setup)
