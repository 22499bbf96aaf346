"""A reward function in this process: a plain one in threads, an `async def` in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from plimsoll.records import Trajectory
from plimsoll.reward.functions.calls import Function, awaited, called, in_thread, within
from plimsoll.reward.outcome import Outcome


@dataclass(frozen=True)
class Here:
    """Calls a function, no more often at the same time than `places` has room. batch: it takes a
    list. coroutine: it is an `async def`. time_limit: seconds for a call, from its begin."""

    function: Function
    batch: bool
    coroutine: bool
    time_limit: float
    places: asyncio.Semaphore

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        async with self.places:
            if self.coroutine:
                work = awaited(self.function, trajectories, self.batch)
            else:
                work = in_thread(partial(called, self.function, trajectories, self.batch))
            return await within(self.time_limit, work, len(trajectories))
