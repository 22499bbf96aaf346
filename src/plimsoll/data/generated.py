"""Rows that a library of tasks generates: https://github.com/open-thought/reasoning-gym.

A separate process generates them (generator.py). Some tasks draw from Python's sets, whose order
differs between processes unless PYTHONHASHSEED is set. With it, the same settings give the same
rows in every run, and in a run that is resumed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from plimsoll.config.data import GenerateConfig, SourceConfig
from plimsoll.config.problems import Problem, Section
from plimsoll.data.report import BadRow, RawRow
from plimsoll.errors import ConfigError

LIBRARY = "reasoning_gym"
COLUMNS = ("question", "answer", "task", LIBRARY)
"""The columns of every row: `question` and `answer` are texts, `task` is the task's name, and
`reasoning_gym` is what the library's reward scores by.
"""
INSTALL = "pip install 'reasoning-gym>=0.1.25,<0.2'"
_GENERATOR = "plimsoll.data.generator"


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
    elif refusal := next((m["refused"] for m in _ask_generator(generate, rows=False)), None):
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
    with closing(_ask_generator(source.generate, rows=True)) as messages:
        for line, message in enumerate(messages, start=1):
            if "values" in message:
                yield RawRow(source.path, line, message["values"])
            elif "problem" in message:
                yield BadRow(source.path, line, message["task"], message["problem"])
            else:
                raise ConfigError(f"{LIBRARY}: {message['refused']}")


def _ask_generator(generate: GenerateConfig, *, rows: bool) -> Generator[dict[str, Any]]:
    """Yield the messages of the generator process, which ends when the caller stops reading."""
    request = {
        "tasks": generate.options(),
        "size": generate.size if rows else 0,
        "seed": generate.seed,
    }
    path = os.pathsep.join(p for p in sys.path if p)
    with subprocess.Popen(
        [sys.executable, "-m", _GENERATOR],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": path},
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            json.dump(request, process.stdin)
            process.stdin.close()
            for line in process.stdout:
                yield json.loads(line)
        except BaseException:  # including Ctrl-C
            process.kill()
            raise
    if process.returncode:
        raise ConfigError(
            f"{LIBRARY} ended with exit code {process.returncode} while it generated rows. What it "
            f"said is above."
        )
