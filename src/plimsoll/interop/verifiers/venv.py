"""Find the virtual environment of verifiers, read its version, and call the player in it.

verifiers pins versions of openai and mcp that conflict with vLLM's, so verifiers is installed in a
separate virtual environment. `plimsoll setup-verifiers` makes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from plimsoll.errors import ConfigError

_RANGE = ">=0.4,<0.5"
REQUIREMENT = f"verifiers{_RANGE}"
VERSIONS = SpecifierSet(_RANGE)
SETUP = "plimsoll setup-verifiers"
PLACE = "PLIMSOLL_VERIFIERS"
"""The environment variable that names another directory for the virtual environment."""
_PLAYER = Path(__file__).parent / "inside" / "player.py"
_PATIENCE = 300.0
"""Seconds for one import: the first import compiles all files, and a disk may be slow."""
_PRINT_VERSION = "import json, verifiers, verifiers.v1; print(json.dumps(verifiers.__version__))"


def venv_directory() -> Path:
    """Return the directory of verifiers' virtual environment, which may not exist.

    It is `PLIMSOLL_VERIFIERS` if that is set. Otherwise it is next to Plimsoll's virtual
    environment, with `-verifiers` after its name. If Plimsoll runs outside of a virtual
    environment, it is in the user's data directory.
    """
    if given := os.environ.get(PLACE):
        return Path(given).expanduser().absolute()
    if sys.prefix != sys.base_prefix:
        prefix = Path(sys.prefix)
        return prefix.with_name(f"{prefix.name}-verifiers")
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "plimsoll" / "verifiers"


def python_of(directory: Path) -> Path:
    """Return the path of a virtual environment's interpreter."""
    return directory / "bin" / "python"


@dataclass(frozen=True)
class VerifiersInstall:
    """The state of verifiers' virtual environment."""

    directory: Path
    exists: bool
    version: str | None = None
    """The version of verifiers; None if it cannot be imported."""
    trouble: str = ""
    """The reason why verifiers cannot be imported."""


def look(directory: Path) -> VerifiersInstall:
    """Return the state of the virtual environment in a directory, by importing verifiers there."""
    python = python_of(directory)
    if not python.exists():
        return VerifiersInstall(directory, exists=False)
    try:
        done = subprocess.run(
            [python, "-c", _PRINT_VERSION], capture_output=True, text=True, timeout=_PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return VerifiersInstall(directory, exists=True, trouble=str(error))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return VerifiersInstall(directory, exists=True, trouble=last)
    return VerifiersInstall(directory, True, json.loads(done.stdout.splitlines()[-1]))


def player_command(task: str) -> list[str]:
    """Return the command line that runs `inside/player.py` with `check`, `tasks` or `play`.

    Raises ConfigError if there is no virtual environment.
    """
    directory = venv_directory()
    if not python_of(directory).exists():
        raise ConfigError(
            f"verifiers is installed in a virtual environment of its own, and there is none at "
            f"{directory}. `{SETUP}` makes it, with `--package NAME` for the package of the "
            f"environment; {PLACE} names another place."
        )
    return [str(python_of(directory)), str(_PLAYER), task]


def opening_line(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first line that the player reads; `name` is TASKSET, or ENVIRONMENT+TASKSET."""
    environment, _, taskset = name.rpartition("+")
    return {"taskset": taskset, "environment": environment, "options": dict(options)}


def ask_player(what: str, name: str, opening: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the player with `check` or `tasks`; yield the JSON lines after its first answer.

    Raises ConfigError, with verifiers' message, if verifiers cannot open the environment.
    """
    with subprocess.Popen(
        player_command(what), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            json.dump(opening, process.stdin)
            process.stdin.close()
            for line in map(json.loads, process.stdout):
                if "refused" in line:
                    raise _refusal(name, line["refused"])
                if "ready" not in line:
                    yield line
        except BaseException:  # Ctrl-C, too
            process.kill()
            raise
    if process.returncode:
        why = f"its process ended with exit code {process.returncode}; its message is above"
        raise _refusal(name, why)


def check_environment(name: str, options: Mapping[str, Any]) -> None:
    """Open an environment with verifiers; raise ConfigError, with its message, if that fails."""
    for _ in ask_player("check", name, opening_line(name, options)):
        pass


def _refusal(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"verifiers cannot open {name!r}: {why.rstrip('.')}. `{SETUP} --package NAME` installs "
        f"the package of an environment; a module of your own is found in a folder on PYTHONPATH."
    )
