"""One call of a reward function, in this process: in a thread, or as a coroutine; what a function
says of itself; and what the pool (processes.py) and its processes (worker.py) tell each other:
pickles, each with its length before it."""

from __future__ import annotations

import asyncio
import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any, TypeVar, get_origin, get_type_hints

from plimsoll.config.base import OptionValue
from plimsoll.records import Trajectory
from plimsoll.reward.outcome import Outcome, TimeLimit, number, numbers, raised

LENGTH = struct.Struct(">Q")


@dataclass(frozen=True)
class Setup:
    """The first message: which function to call, and how.
    memory_bytes: what it may take beyond what it has once the function is loaded."""

    name: str
    options: Mapping[str, OptionValue]
    batch: bool
    memory_bytes: int | None


def framed(message: bytes) -> bytes:
    """A message with its length before it."""
    return LENGTH.pack(len(message)) + message


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


def takes_many(function: partial[Any]) -> bool:
    """Whether its first parameter is annotated as a list or another sequence."""
    return get_origin(_first_annotation(function.func)) in (list, tuple, Sequence)


def is_coroutine(function: partial[Any]) -> bool:
    """Whether it is an `async def`."""
    return inspect.iscoroutinefunction(function.func)


def _first_annotation(function: Callable[..., Any]) -> object:
    parameters = [*inspect.signature(function).parameters.values()]
    written = parameters[0].annotation if parameters else None
    if not isinstance(written, str):
        return written
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):  # names that only a type checker imports
        return Sequence[Any] if written.startswith(_MANY) else None
    return hints.get(parameters[0].name)


_MANY = ("list[", "tuple[", "Sequence[", "collections.abc.Sequence[")


@dataclass(frozen=True)
class Here:
    """Calls a function in this process.

    Attributes:
        function: the function.
        batch: whether it takes a list.
        coroutine: whether it is an `async def`.
        limit: how long a call may take.
    """

    function: Function
    batch: bool
    coroutine: bool
    limit: TimeLimit

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        if self.coroutine:
            work, left = awaited(self.function, trajectories, self.batch), ""
        else:
            work = in_thread(partial(called, self.function, trajectories, self.batch))
            left = "; its thread goes on, as nothing can end it (process: true makes it a process)"
        try:
            async with asyncio.timeout(self.limit.seconds):
                return await work
        except TimeoutError:
            return [self.limit.exceeded(after=left)] * len(trajectories)
