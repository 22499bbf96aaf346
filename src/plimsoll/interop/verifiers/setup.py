"""Make the virtual environment of verifiers, and write environments' tasks as data files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.interop.environments.verifiers import PREFIX
from plimsoll.interop.verifiers.venv import (
    PLACE,
    REQUIREMENT,
    SETUP,
    ask_player,
    look,
    opening_line,
    python_of,
    venv_directory,
)
from plimsoll.run.counting import plural
from plimsoll.run.files import whole_file

_ELSEWHERE = ("PIP_TARGET", "PIP_PREFIX", "PYTHONPATH", "PYTHONHOME")
"""Environment variables that make pip install packages, or Python search them, elsewhere."""


def set_up(directory: Path | None, packages: Sequence[str], python: str | None) -> str:
    """Make the virtual environment, or add packages to it; return a sentence about the result.

    After an interrupted installation, call this again: pip keeps its downloads.

    Args:
        directory: The virtual environment's directory; default: `venv_directory`.
        packages: Packages besides verifiers, in pip's form.
        python: The interpreter for the virtual environment; default: the present interpreter.

    Raises ConfigError if the directory cannot be used, and PlimsollError if a step fails; the
    step's message is then on the terminal.
    """
    where = directory or venv_directory()
    if where.exists() and any(where.iterdir()) and not (where / "pyvenv.cfg").is_file():
        raise ConfigError(
            f"{where} is not empty, and not a virtual environment. Give another place."
        )
    print(f"making a virtual environment in {where}", flush=True)
    _run(
        [python or sys.executable, "-m", "venv", str(where)],
        "Python's venv is needed, too: apt install python3-venv",
    )
    print(f"installing {', '.join([REQUIREMENT, *packages])}", flush=True)
    pip = [str(python_of(where)), "-m", "pip", "--disable-pip-version-check"]
    _run(
        [*pip, "install", REQUIREMENT, *packages],
        f"Mend what it says, and run `{SETUP}` again: pip keeps what it downloaded",
    )
    installed = look(where)
    if installed.version is None:
        raise PlimsollError(f"verifiers cannot be imported in {where}: {installed.trouble}.")
    elsewhere = "" if where == venv_directory() else f" Set {PLACE}={where}, so that runs find it."
    return f"verifiers {installed.version} is in {where}.{elsewhere}"


def _run(command: Sequence[str], remedy: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in _ELSEWHERE} | {"PIP_USER": "0"}
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be run: {error.strerror}.") from error
    if done.returncode:
        raise PlimsollError(
            f"`{' '.join(command)}` ended with exit code {done.returncode}; its message is above. "
            f"{remedy}."
        )


def write_tasks(
    name: str, options: Mapping[str, Any], limit: int | None, skip: int, out: Path
) -> str:
    """Write an environment's tasks as JSON lines, {messages, task}; return a text about them.

    Args:
        name: The environment's name in a config, with or without `verifiers:`.
        options: Keys of the environment's config.
        limit: The most tasks to write; None for all.
        skip: The number of tasks to leave out first.
        out: The file to write.

    Raises ConfigError if verifiers cannot open the environment, or if there are no tasks.
    """
    plain = name.removeprefix(PREFIX)
    opening = {**opening_line(plain, options), "limit": limit, "skip": skip}
    rows = 0
    with whole_file(out) as partial, partial.open("w", encoding="utf-8") as file:
        for task in ask_player("tasks", plain, opening):
            file.write(json.dumps(task, ensure_ascii=False) + "\n")
            rows += 1
        if not rows:
            raise ConfigError(f"{name} gives no tasks, after the first {skip}.")
    return (
        f"{plural(rows, 'task')} of {plain} in {out}, for\n"
        f"  data: {{train: {{path: {out}, messages: messages}}}}\n"
        f'  environments: {{own: {{name: "{PREFIX}{plain}"}}}}'
    )
