"""What the processes that rewards start hold on the host of the process that runs the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from plimsoll.config.base import Choice
from plimsoll.config.reward import RewardConfig
from plimsoll.errors import ConfigError
from plimsoll.reward.adapters import named_adapter, reward_function
from plimsoll.reward.references import Asked, processes_asked
from plimsoll.timeline.items import Item

MOST_PROCESSES = 8
"""Of one reward, where `at_once` does not say; and no more than there are cores."""

_MIB = 2**20
_OWN_PROCESS = 51 * _MIB
_SOURCE = "measured: Linux, Python 3.11, with NumPy 2 and psutil, 52.9 MB resident"


def process_items(rewards: Mapping[str, Choice], cores: int | None) -> Iterator[Item]:
    """Of each reward in processes of its own, and of each that asks processes. cores: of its
    machine; None where they are not known.

    What a function of one's own loads and makes there, and what programs of a policy take, is not
    in it.
    """
    for name, part in rewards.items():
        if not isinstance(part, RewardConfig) or not part.name:
            continue
        count = part.at_once or min(cores or MOST_PROCESSES, MOST_PROCESSES)
        if part.process:
            yield processes_item(f"processes of rewards.{name}", count, _OWN_PROCESS, _SOURCE)
        is_own = ":" in part.name or named_adapter(part.name) is not None
        asked = None if is_own else _asked(part)
        if asked is not None:
            yield processes_item(
                f"processes that rewards.{name} asks", count, asked.bytes, asked.source
            )


def _asked(part: RewardConfig) -> Asked | None:
    """What a rule of the house asks; None too where it cannot be used, which others tell."""
    try:
        return processes_asked(reward_function(part))
    except ConfigError:
        return None


def processes_item(name: str, count: int, each: int, source: str) -> Item:
    """So many processes of so many bytes each, beside the one that runs the loop."""
    words = f"{each:,} bytes a process" + (f" x {count} processes" if count > 1 else "")
    return Item("process", "processes", name, "host", "process", count * each, words, source)
