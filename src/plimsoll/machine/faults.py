"""Points of a run at which tests inject faults, to see that the run survives them.

Without the variable `PLIMSOLL_FAULTS` a point costs one lookup of the environment. With it, what
happens is decided by the package `fault_injection` (tests/support), which must be on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from plimsoll.errors import ConfigError

V = TypeVar("V")

FAULTS = "PLIMSOLL_FAULTS"
"""The environment variable with the faults."""
DIRECTORY = "PLIMSOLL_FAULTS_DIRECTORY"
"""The environment variable with the directory for marks and the record of faults. On several nodes
they must share it."""
PROCESS = "PLIMSOLL_FAULTS_PROCESS"
"""The environment variable in which `name_process` keeps the process's name, such as `rank=1`."""


def fault_point(name: str, step: int | None = None, *, path: Path | None = None) -> None:
    """Do nothing, unless `PLIMSOLL_FAULTS` names this point: then fail as it says.

    Args:
        name: The name of the point.
        step: The step under way, from 1, where it is known.
        path: The file, or directory of files, that a fault may cut.
    """
    if os.environ.get(FAULTS):
        _injection().fail(name, step, path)


async def await_fault_point(name: str, step: int | None = None) -> None:
    """Do what `fault_point` does, and let other coroutines go on while a call waits."""
    if os.environ.get(FAULTS):
        await _injection().await_failure(name, step)


def fault_value(name: str, value: V, step: int | None = None) -> V:
    """Return the value, or a wrong copy if `PLIMSOLL_FAULTS` says so; or fail."""
    if not os.environ.get(FAULTS):
        return value
    spoiled: V = _injection().fail_or_spoil(name, value, step)
    return spoiled


def name_process(kind: str, number: int) -> None:
    """Note which `rank` or `engine` this process is; processes that it starts later are the same.

    Without faults this does nothing.
    """
    if os.environ.get(FAULTS):
        os.environ[PROCESS] = f"{kind}={number}"


def fault_settings() -> dict[str, str]:
    """Return the environment variables that a process on any node needs to have the faults.

    Raises ConfigError for a fault that cannot be, or if `fault_injection` cannot be imported.
    """
    if not (text := os.environ.get(FAULTS)):
        return {}
    injection = _injection()
    injection.parse_faults(text)
    home = str(Path(injection.__file__).parents[1])
    paths = dict.fromkeys([home, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    given = {name: os.environ[name] for name in (FAULTS, DIRECTORY) if name in os.environ}
    return {**given, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@cache
def _injection() -> Any:
    try:
        return importlib.import_module("fault_injection")
    except ModuleNotFoundError as error:
        if error.name != "fault_injection":
            raise
        raise ConfigError(
            f"{FAULTS} is set, and what makes faults is not installed: put tests/support of "
            f"Plimsoll's source on PYTHONPATH, or unset the variable."
        ) from error
