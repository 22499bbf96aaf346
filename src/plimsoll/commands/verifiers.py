"""`plimsoll setup-verifiers` and `plimsoll verifiers-tasks`: the virtual environment that verifiers
has to itself, and the tasks of its environments as data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from plimsoll.environment.verifiers.venv import (
    PLACE,
    PREFIX,
    REQUIREMENT,
    SETUP,
    look,
    place,
    player_command,
    python_of,
    refused,
    setup_of,
)
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.run.counting import counted
from plimsoll.run.files import whole_file

_ELSEWHERE = ("PIP_TARGET", "PIP_PREFIX", "PYTHONPATH", "PYTHONHOME")
"""Settings that would have packages installed, or looked for, elsewhere."""


def set_up(directory: Path | None, packages: Sequence[str], python: str | None) -> str:
    """Make the virtual environment, or add to it, and install verifiers and these packages; gives
    what to say of it. Where it was interrupted, the same again goes on: pip keeps what it loaded.

    directory: default: `place`. python: of another version; default: this one.
    Raises PlimsollError where a step fails; what it said is then on the terminal.
    """
    where = directory or place()
    if where.exists() and any(where.iterdir()) and not (where / "pyvenv.cfg").is_file():
        raise ConfigError(f"{where} is no virtual environment, and not empty: give another place.")
    print(f"making a virtual environment in {where}", flush=True)
    _run(
        [python or sys.executable, "-m", "venv", str(where)],
        "Python's venv is needed, too: apt install python3-venv",
    )
    print(f"installing {', '.join([REQUIREMENT, *packages])}", flush=True)
    pip = [str(python_of(where)), "-m", "pip", "--disable-pip-version-check"]
    _run(
        [*pip, "install", REQUIREMENT, *packages],
        f"Mend what it says, and run `{SETUP}` again: what was loaded is kept",
    )
    found = look(where)
    if found.version is None:
        raise PlimsollError(f"verifiers cannot be imported in {where}: {found.trouble}.")
    elsewhere = "" if where == place() else f" Set {PLACE}={where} for it to be found there."
    return f"verifiers {found.version} is in {where}.{elsewhere}"


def _run(command: Sequence[str], way_out: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in _ELSEWHERE} | {"PIP_USER": "0"}
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be run: {error.strerror}.") from error
    if done.returncode:
        raise PlimsollError(
            f"`{' '.join(command)}` ended with exit code {done.returncode}; what it said is above. "
            f"{way_out}."
        )


def write_tasks(
    name: str, options: Mapping[str, Any], limit: int | None, skip: int, out: Path
) -> str:
    """Write the tasks of an environment as JSON lines, {messages, task}; gives what to say of them.

    name: as an environment is named in a config. options: keys of its config.
    Raises ConfigError for what verifiers says against it.
    """
    plain = name.removeprefix(PREFIX)
    rows = 0
    with whole_file(out) as partial, partial.open("w", encoding="utf-8") as file:
        asked = {**setup_of(plain, dict(options)), "limit": limit, "skip": skip}
        for message in _tasks(plain, asked):
            file.write(json.dumps(message, ensure_ascii=False) + "\n")
            rows += 1
        if not rows:
            raise ConfigError(f"{name} gives no tasks, after the first {skip}.")
    return (
        f"{counted(rows, 'task')} of {plain} in {out}, for\n"
        f"  data: {{train: {{path: {out}, messages: messages}}}}\n"
        f'  environments: {{own: {{name: "{PREFIX}{plain}"}}}}'
    )


def _tasks(name: str, setup: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    with subprocess.Popen(
        player_command("tasks"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            json.dump(setup, process.stdin)
            process.stdin.close()
            for line in process.stdout:
                message = json.loads(line)
                if "refused" in message:
                    raise refused(name, message["refused"])
                if "task" in message:
                    yield message
        except BaseException:  # Ctrl-C, too
            process.kill()
            raise
    if process.returncode:
        raise PlimsollError(
            f"verifiers ended with exit code {process.returncode} while it loaded tasks; what it "
            f"said is above."
        )
