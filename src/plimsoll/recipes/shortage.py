"""A run that runs out of memory ends with why, and with what would have fitted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from plimsoll.config.jobs import JobConfig
from plimsoll.errors import ConfigError
from plimsoll.memory.explain.as_text import explanation_text
from plimsoll.memory.explain.explain import explain
from plimsoll.memory.explain.incident import Incident, OutOfMemory
from plimsoll.recipes.planning import constants_of, hardware_of
from plimsoll.run.clock import TimedPhase
from plimsoll.run.directory import RunDirectory


@contextmanager
def explaining_shortage(
    config: JobConfig, directory: RunDirectory, phase: TimedPhase
) -> Iterator[None]:
    """Within: OutOfMemory is raised with its explanation, which is in the run directory, too."""
    try:
        yield
    except OutOfMemory as error:
        text = f"{error}\n{explanation_of(config, error.incident, phase)}"
        directory.write_out_of_memory(f"{text}\n")
        written = f"{text}\nThis is in {directory.out_of_memory_path}, too."
        raise OutOfMemory(written, error.incident) from error


def explanation_of(config: JobConfig, incident: Incident, phase: TimedPhase) -> str:
    """The explanation as text; for a model whose shape is not known, why there is none."""
    hardware, constants = hardware_of(config.cluster), constants_of(config.cluster)
    try:
        return explanation_text(explain(config, hardware, constants, incident, phase))
    except ConfigError as error:
        return f"no plan of memory to hold this against: {error}"
