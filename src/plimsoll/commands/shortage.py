"""A run that runs out of memory ends with why, and with what would have fitted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plimsoll.commands.planning import constants_of, hardware_of
from plimsoll.errors import ConfigError
from plimsoll.machine.incident import Incident, OutOfMemory
from plimsoll.memory.explain.as_text import explanation_text
from plimsoll.memory.explain.explain import explain
from plimsoll.run.directory import RunDirectory
from plimsoll.run.files import write_whole
from plimsoll.spec.run_spec import RunSpec


@contextmanager
def explaining_shortage(spec: RunSpec[Any]) -> Iterator[None]:
    """Within: OutOfMemory is raised with its explanation, which is in the run directory, too."""
    try:
        yield
    except OutOfMemory as error:
        if error.incident.phase is None:
            raise
        directory = RunDirectory(Path(spec.run.directory))
        text = f"{error}\n{explanation_of(spec, error.incident, error.incident.phase)}"
        write_whole(directory.out_of_memory_path, f"{text}\n")
        written = f"{text}\nThis is in {directory.out_of_memory_path}, too."
        raise OutOfMemory(written, error.incident) from error


def explanation_of(spec: RunSpec[Any], incident: Incident, phase: str) -> str:
    """The explanation as text; for a model whose shape is not known, why there is none."""
    hardware, constants = hardware_of(spec.cluster), constants_of(spec.cluster)
    try:
        return explanation_text(explain(spec, hardware, constants, incident, phase))
    except ConfigError as error:
        return f"no plan of memory to hold this against: {error}"
