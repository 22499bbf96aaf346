"""Sample groups beside the training loop, in the event loop of another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from plimsoll.errors import PlimsollError
from plimsoll.reward.score import Scored
from plimsoll.rl.buffer import FinishedGroup, GroupBuffer

SampleGroup = Callable[[int, int], Coroutine[Any, Any, Scored]]
"""Samples and scores a group. Args: the place of its prompt, the version of the newest weights."""


class GroupStream:
    """Keeps as many groups in flight as the buffer allows.

    Consumes: places of prompts, and versions of new weights (`renew`). Waits for: the groups in
    flight, that is for engines, environments and rewards. Unblocked by: a group that ends, a step
    that has its groups (`advance`), and new weights. Produces: the groups of each step; the first
    error of a group is raised by `take`. Shut down by `end`, which cancels all groups.

    All methods are coroutines of one event loop, so that nothing changes the buffer meanwhile.
    """

    def __init__(self, buffer: GroupBuffer, sample: SampleGroup) -> None:
        self._buffer, self._sample = buffer, sample
        self._version = buffer.learns
        self._tasks: set[asyncio.Task[Scored]] = set()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._waited = False

    async def renew(self, version: int) -> None:
        """Begin the groups for which there is room now that engines have weights of `version`."""
        self._version = version
        self._begin()

    async def take(self, count: int) -> list[FinishedGroup]:
        """Take groups for the next step, as soon as so many have ended."""
        while True:
            if self._error is not None:
                raise self._error
            if (taken := self._buffer.take(count)) is not None:
                self._buffer, groups = taken
                return groups
            self._waited = True
            self._changed.clear()
            await self._changed.wait()

    async def set_aside(self, count: int) -> None:
        """Begin others instead of groups that were taken and teach nothing."""
        self._buffer = self._buffer.set_aside(count)
        self._begin()

    async def advance(self) -> tuple[GroupBuffer, GroupBuffer]:
        """Go on to the step after the one that has taken its groups, and begin others.

        Returns:
            The buffer of the step that has its groups, and of the next before others begin.
        """
        before, after = self._buffer, self._buffer.advance(self._waited)
        self._buffer, self._waited = after, False
        self._begin()
        return before, after

    async def end(self) -> None:
        """Cancel all groups in flight, and wait for their end."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        self._buffer, places = self._buffer.begin(self._version)
        for place in places:
            task = asyncio.get_running_loop().create_task(self._sample(place, self._version))
            self._tasks.add(task)
            task.add_done_callback(partial(self._finish, place))

    def _finish(self, place: int, task: asyncio.Task[Scored]) -> None:
        if task not in self._tasks:  # `end` has cancelled it
            return
        self._tasks.remove(task)
        if task.cancelled():
            self._error = self._error or PlimsollError(f"group {place} was cancelled")
        elif (error := task.exception()) is not None:
            self._error = self._error or error
        elif task.result().failures:
            self._buffer = self._buffer.give_up(place)
        else:
            group = FinishedGroup(place, task.result().trajectories)
            self._buffer = self._buffer.finish(group)
        self._begin()
        self._changed.set()
