"""How many episodes are in flight; and what environments in processes of their own hold on the host
where the loop runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

from plimsoll.config.environment import EnvironmentConfig
from plimsoll.config.rollout import RolloutConfig
from plimsoll.environment.verifiers.venv import PREFIX
from plimsoll.reward.price import processes_item
from plimsoll.timeline.items import Item

_WAITING = 1.5
"""Episodes in flight for each that the engines work on at once: the others wait for their
environments."""
_PER_CORE = 4
"""Processes, where `at_once` does not say: they wait for the policy most of the time."""
_CORES = 8
"""Where they are not known."""
_PROCESS = 52 * 2**20
_SOURCE = "measured: Linux, Python 3.11, with NumPy 2 and jsonschema, 54.3 MB resident"
_VERIFIERS = 292 * 2**20
_VERIFIERS_SOURCE = "measured: verifiers 0.4.0, 400 episodes of one turn at once, 305 MB resident"


def processes_of(config: EnvironmentConfig, cores: int | None) -> int:
    """How many an environment is played in at most."""
    return config.at_once or _PER_CORE * (cores or _CORES)


def episodes_at_once(
    environments: Mapping[str, EnvironmentConfig], rollout: RolloutConfig, cores: int | None
) -> int:
    """In flight over all engines, whichever environment they are of: as many as each allows."""
    default = ceil(_WAITING * rollout.engines * rollout.max_sequences)
    return min(
        processes_of(one, cores) if one.process else one.at_once or default
        for one in environments.values()
    )


def process_items(
    environments: Mapping[str, EnvironmentConfig], cores: int | None
) -> Iterator[Item]:
    """Of each that asks for them, or is of verifiers. What its class loads and makes there, and
    what tool servers hold, is not in it."""
    for name, config in environments.items():
        if config.name.startswith(PREFIX):
            what = f"process of environments.{name}"
            yield processes_item(what, 1, _VERIFIERS, _VERIFIERS_SOURCE)
        elif config.process:
            count = processes_of(config, cores)
            yield processes_item(f"processes of environments.{name}", count, _PROCESS, _SOURCE)
