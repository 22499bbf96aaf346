"""Count episodes in flight, and the host memory of the processes of environments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

from plimsoll.config.rollout import EnvironmentConfig, RolloutConfig
from plimsoll.reward.references import processes_item
from plimsoll.timeline.items import Item

_WAITING = 1.5
"""Episodes in flight for each that the engines work on at once; the others wait for their
environments."""
_PER_CORE = 4
"""Processes for each core if `at_once` does not say: they wait for the policy most of the time."""
_CORES = 8
"""The number of cores if it is not known."""
_PROCESS = 52 * 2**20
_SOURCE = "measured: Linux, Python 3.11, with NumPy 2 and jsonschema, 54.3 MB resident"


def processes_of(config: EnvironmentConfig, cores: int | None) -> int:
    """Return the largest number of processes for an environment."""
    return config.at_once or _PER_CORE * (cores or _CORES)


def episodes_at_once(
    environments: Mapping[str, EnvironmentConfig], rollout: RolloutConfig, cores: int | None
) -> int:
    """Return the number of episodes in flight, all engines together: the lowest limit applies."""
    default = ceil(_WAITING * rollout.engines * rollout.max_sequences)
    return min(
        processes_of(config, cores) if config.process else config.at_once or default
        for config in environments.values()
    )


def process_items(
    environments: Mapping[str, EnvironmentConfig], cores: int | None
) -> Iterator[Item]:
    """Yield the host memory of each environment's processes, if it has processes.

    The memory of the environment's own objects and of tool servers is not counted.
    """
    for name, config in environments.items():
        if config.process:
            count = processes_of(config, cores)
            yield processes_item(f"processes of environments.{name}", count, _PROCESS, _SOURCE)
