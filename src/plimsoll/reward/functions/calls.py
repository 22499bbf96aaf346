"""One call of a reward function, in this process: in a thread, or as a coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

from plimsoll.records import Trajectory
from plimsoll.reward.outcome import Failed, Outcome, number, numbers, raised

Function = Callable[[Any], Any]
"""Takes a trajectory, or a list of them."""

_T = TypeVar("_T")


def called(function: Function, trajectories: Sequence[Trajectory], batch: bool) -> list[Outcome]:
    """What a plain function gives, whatever it does. batch: it takes a list; else there is one
    trajectory."""
    try:
        value = function([*trajectories] if batch else trajectories[0])
    except BaseException as error:  # noqa: BLE001  own code may do anything
        return [raised(error)] * len(trajectories)
    return _outcomes(value, len(trajectories), batch)


async def awaited(
    function: Function, trajectories: Sequence[Trajectory], batch: bool
) -> list[Outcome]:
    """The same of an `async def`. Where this is cancelled, so is the function."""
    task = asyncio.current_task()
    try:
        value = await function([*trajectories] if batch else trajectories[0])
    except BaseException as error:
        if task is not None and task.cancelling():
            raise
        return [raised(error)] * len(trajectories)
    return _outcomes(value, len(trajectories), batch)


def _outcomes(value: object, wanted: int, batch: bool) -> list[Outcome]:
    return numbers(value, wanted) if batch else [number(value)]


async def in_thread(function: Callable[[], _T]) -> _T:
    """What a function that never raises gives, called in a thread of its own. Where this is
    cancelled, the thread is left alone: nothing can end it, and the process does not wait for it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T) -> None:
        if not done.done():
            done.set_result(result)

    def run() -> None:
        result = function()
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result)

    Thread(target=run, name="reward", daemon=True).start()
    return await done


async def within(
    seconds: float, work: Awaitable[Sequence[Outcome]], wanted: int
) -> Sequence[Outcome]:
    """What the work gives, or failures where it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        return [Failed(f" took longer than its time_limit of {seconds:g} s")] * wanted
