"""A process that calls one reward function; started by processes.py. It is asked lists of
trajectories, and answers a list of outcomes to each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from plimsoll.config.base import Choice
from plimsoll.records import Trajectory
from plimsoll.reward.adapters import reward_function
from plimsoll.reward.functions.calls import Setup, awaited, called, is_coroutine
from plimsoll.reward.functions.child import Opened, serve
from plimsoll.reward.outcome import Outcome


def _opened(setup: Setup) -> Opened:
    choice = Choice(name=setup.name, options=dict(setup.options))
    function = reward_function(choice)
    return partial(_answer, function, setup.batch), setup.memory_bytes


def _answer(
    function: partial[Any], batch: bool, trajectories: Sequence[Trajectory]
) -> list[Outcome]:
    if is_coroutine(function):
        return asyncio.run(awaited(function, trajectories, batch))
    return called(function, trajectories, batch)


if __name__ == "__main__":
    serve(_opened)
