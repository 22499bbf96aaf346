"""Estimate the memory of the processes that rewards start on the training loop's host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from plimsoll.config.base import Choice
from plimsoll.config.reward import RewardConfig
from plimsoll.errors import ConfigError
from plimsoll.process.patterns import PROCESS_BYTES
from plimsoll.reward.functions import named_adapter, reward_function
from plimsoll.reward.references import HelperProcesses, processes_of
from plimsoll.timeline.items import Item

MOST_PROCESSES = 8
"""The most processes of one reward if `at_once` is not given; never more than there are cores."""

_MIB = 2**20
_OWN_PROCESS = 51 * _MIB
_SOURCE = "measured: Linux, Python 3.11, with NumPy 2 and psutil, 52.9 MB resident"


def process_items(rewards: Mapping[str, Choice], cores: int | None) -> Iterator[Item]:
    """Yield a memory item for each reward's processes, and for the helper processes it waits for.

    The memory of a user's function and of a policy's programs is not counted. `cores` is the
    number of the machine's cores; None if unknown.
    """
    for name, part in rewards.items():
        if not isinstance(part, RewardConfig):
            continue
        if part.judge is not None:
            count = min(cores or MOST_PROCESSES, MOST_PROCESSES)
            matching = f"processes that match rewards.{name}'s pattern"
            yield processes_item(matching, count, PROCESS_BYTES, _SOURCE)
        if not part.name:
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
    """Return the memory item of `count` processes of `each` bytes, on the training loop's host."""
    words = f"{each:,} bytes a process" + (f" x {count} processes" if count > 1 else "")
    return Item("process", "processes", name, "host", "process", count * each, words, source)
