"""The virtual environment of verifiers: where it is, what it has, and what its Python is asked.

verifiers pins other versions of libraries that vLLM needs (openai, mcp), so it has one of its own.
`plimsoll setup-verifiers` makes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from plimsoll.errors import ConfigError

PREFIX = "verifiers:"
"""What the names of its environments begin with."""
REQUIREMENT = "verifiers>=0.4,<0.5"
VERSIONS = SpecifierSet(">=0.4,<0.5")
SETUP = "plimsoll setup-verifiers"
PLACE = "PLIMSOLL_VERIFIERS"
"""The environment variable that names another place."""
_INSIDE = Path(__file__).parent / "inside"
PLAYER = _INSIDE / "player.py"
_PATIENCE = 300.0
"""Seconds: a first import compiles everything, and slow disks take long."""
_SEE = "import json, verifiers, verifiers.v1; print(json.dumps(verifiers.__version__))"


def place() -> Path:
    """The directory: beside the virtual environment that Plimsoll runs in, under its name and
    `-verifiers`; outside of one, in the user's data."""
    given = os.environ.get(PLACE)
    if given:
        return Path(given).expanduser().absolute()
    if sys.prefix != sys.base_prefix:
        own = Path(sys.prefix)
        return own.with_name(f"{own.name}-verifiers")
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "plimsoll" / "verifiers"


def python_of(directory: Path) -> Path:
    """The interpreter of a virtual environment."""
    return directory / "bin" / "python"


@dataclass(frozen=True)
class Found:
    """What was seen of it. version: of verifiers; None where it cannot be imported, and then
    trouble says why."""

    directory: Path
    exists: bool
    version: str | None = None
    trouble: str = ""


def look(directory: Path) -> Found:
    """Import verifiers there."""
    python = python_of(directory)
    if not python.exists():
        return Found(directory, exists=False)
    try:
        done = subprocess.run(
            [python, "-c", _SEE], capture_output=True, text=True, timeout=_PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Found(directory, exists=True, trouble=str(error))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Found(directory, exists=True, trouble=last)
    return Found(directory, exists=True, version=json.loads(done.stdout.splitlines()[-1]))


def player_command(task: str) -> list[str]:
    """The command of `inside/player.py`. task: `check`, `tasks` or `play`.

    Raises ConfigError where there is no virtual environment.
    """
    python = python_of(place())
    if not python.exists():
        raise ConfigError(
            f"verifiers is installed in a virtual environment of its own, and there is none at "
            f"{place()}. `{SETUP}` makes it, with `--package NAME` for the package of the "
            f"environment; {PLACE} names another place."
        )
    return [str(python), str(PLAYER), task]


def setup_of(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What the player is told first. name: TASKSET, or ENVIRONMENT+TASKSET, as verifiers shows
    them."""
    environment, _, taskset = name.rpartition("+")
    return {"taskset": taskset, "environment": environment, "options": options}


def check(name: str, options: dict[str, Any]) -> None:
    """Have verifiers open an environment. Raises ConfigError for what it says against it."""
    done = subprocess.run(
        player_command("check"),
        input=json.dumps(setup_of(name, options)),
        stdout=subprocess.PIPE,
        text=True,
        timeout=_PATIENCE,
    )
    found = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}
    if "ready" not in found:
        raise refused(name, found.get("refused") or "its process ended; what it said is above")


def refused(name: str, said: str) -> ConfigError:
    """Of an environment that cannot be opened. said: by verifiers."""
    return ConfigError(
        f"verifiers cannot open {name!r}: {said.rstrip('.')}. `{SETUP} --package NAME` installs "
        f"the package of an environment; a module of your own is found in a folder on PYTHONPATH."
    )
