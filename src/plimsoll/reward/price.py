"""Price the processes that rewards start, on the host of the process that runs the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from plimsoll.config.base import Choice
from plimsoll.config.reward import RewardConfig
from plimsoll.errors import ConfigError
from plimsoll.reward.adapters import named_adapter, reward_function
from plimsoll.reward.references import HelperProcesses, processes_of
from plimsoll.timeline.items import Item

MOST_PROCESSES = 8
"""Processes of one reward if `at_once` is not given, and never more than there are cores."""

_MIB = 2**20
_OWN_PROCESS = 51 * _MIB
_SOURCE = "measured: Linux, Python 3.11, with NumPy 2 and psutil, 52.9 MB resident"


def process_items(rewards: Mapping[str, Choice], cores: int | None) -> Iterator[Item]:
    """Yield the memory of each reward's own processes, and of those that it waits for.

    The memory that a user's function takes, or programs of a policy, is not counted. `cores` are
    those of the machine; None if unknown.
    """
    for name, part in rewards.items():
        if not isinstance(part, RewardConfig) or not part.name:
            continue
        count = part.at_once or min(cores or MOST_PROCESSES, MOST_PROCESSES)
        if part.process:
            yield processes_item(f"processes of rewards.{name}", count, _OWN_PROCESS, _SOURCE)
        is_own = ":" in part.name or named_adapter(part.name) is not None
        helpers = None if is_own else _helpers(part)
        if helpers is not None:
            yield processes_item(
                f"processes that rewards.{name} asks", count, helpers.bytes, helpers.source
            )


def _helpers(part: RewardConfig) -> HelperProcesses | None:
    try:
        return processes_of(reward_function(part))
    except ConfigError:  # which is refused elsewhere
        return None


def processes_item(name: str, count: int, each: int, source: str) -> Item:
    """Return the row of `count` processes of `each` bytes, beside the process of the loop."""
    words = f"{each:,} bytes a process" + (f" x {count} processes" if count > 1 else "")
    return Item("process", "processes", name, "host", "process", count * each, words, source)
