"""Python functions as rewards: called in threads, as coroutines, or in processes of their own.

A function that harms its own process does not harm the run.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, get_origin, get_type_hints

from plimsoll.config.reward import RewardConfig
from plimsoll.machine.faults import await_fault_point, fault_value
from plimsoll.process.child import ChildEnded, Pool, Program
from plimsoll.process.threads import in_thread
from plimsoll.records import Trajectory
from plimsoll.reward.adapters import reward_function
from plimsoll.reward.outcome import (
    Failed,
    Outcome,
    RewardCall,
    TimeLimit,
    error_outcome,
    number,
    numbers,
)

Function = Callable[[Any], Any]
"""Takes a trajectory, or a list of them."""

_MANY = ("list[", "tuple[", "Sequence[", "collections.abc.Sequence[")


def _call_function(
    function: Function, trajectories: Sequence[Trajectory], batch: bool
) -> list[Outcome]:
    """Call a plain function and return one outcome per trajectory; any error becomes an outcome.

    If `batch` is true, the function takes the list; if not, there must be only one trajectory.
    """
    try:
        value = function([*trajectories] if batch else trajectories[0])
        value = fault_value("reward.call", value)
    except BaseException as error:  # noqa: BLE001  the user's code may do anything
        return [error_outcome(error)] * len(trajectories)
    return _outcomes(value, len(trajectories), batch)


async def _await_function(
    function: Function, trajectories: Sequence[Trajectory], batch: bool
) -> list[Outcome]:
    """Call an `async def` like `_call_function`; a cancellation cancels the function, too."""
    task = asyncio.current_task()
    try:
        await await_fault_point("reward.call")
        value = await function([*trajectories] if batch else trajectories[0])
    except BaseException as error:
        if task is not None and task.cancelling():
            raise
        return [error_outcome(error)] * len(trajectories)
    return _outcomes(value, len(trajectories), batch)


def _outcomes(value: object, wanted: int, batch: bool) -> list[Outcome]:
    return numbers(value, wanted) if batch else [number(value)]


def takes_many(function: partial[Any]) -> bool:
    """Return whether a function's first parameter is annotated as a list, a tuple or a Sequence."""
    return get_origin(_first_annotation(function.func)) in (list, tuple, Sequence)


def is_coroutine(function: partial[Any]) -> bool:
    """Return whether the function is an `async def`."""
    return inspect.iscoroutinefunction(function.func)


def _first_annotation(function: Callable[..., Any]) -> object:
    parameters = [*inspect.signature(function).parameters.values()]
    annotation = parameters[0].annotation if parameters else None
    if not isinstance(annotation, str):
        return annotation
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):  # names that only a type checker imports
        return Sequence[Any] if annotation.startswith(_MANY) else None
    return hints.get(parameters[0].name)


def call_here(function: partial[Any], batch: bool, limit: TimeLimit) -> RewardCall:
    """Return the try that calls a reward function in this process.

    `batch` says whether the function takes a list.
    """

    async def call(trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        if is_coroutine(function):
            work, left = _await_function(function, trajectories, batch), ""
        else:
            work = in_thread(partial(_call_function, function, trajectories, batch))
            left = "; its thread goes on, as nothing can end it (process: true makes it a process)"
        try:
            async with asyncio.timeout(limit.seconds):
                return await work
        except TimeoutError:
            return [limit.failure(after=left)] * len(trajectories)

    return call


def call_in_processes(
    config: RewardConfig, batch: bool, limit: TimeLimit, size: int, stack: AsyncExitStack
) -> RewardCall:
    """Return the try that calls a config's function in one of at most `size` processes.

    Closing `stack` ends the processes. `batch` says whether the function takes a list. The try
    raises PlimsollError if no process can be started.
    """
    program = Program(
        open_function,
        what=f"The process for reward function {config.name}",
        setup=(config, batch),
        codec="pickle",
        memory_gib=config.memory_gib,
    )
    pool = Pool(program, size)
    stack.callback(pool.close)

    async def call(trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        sent = [replace(t, transcript=None) for t in trajectories]
        try:
            outcomes: Sequence[Outcome] = await in_thread(partial(pool.ask, sent, limit.seconds))
            return outcomes
        except TimeoutError:
            failed = limit.failure(after="; its process was ended")
        except ChildEnded as ended:
            failed = Failed(f"'s process {ended}", ended.lines)
        return [failed] * len(trajectories)

    return call


def open_function(
    setup: tuple[RewardConfig, bool],
) -> Callable[[Sequence[Trajectory]], list[Outcome]]:
    """Return the function that runs in the child: it takes trajectories and returns outcomes."""
    config, batch = setup
    return partial(_answer, reward_function(config), batch)


def _answer(
    function: partial[Any], batch: bool, trajectories: Sequence[Trajectory]
) -> list[Outcome]:
    if is_coroutine(function):
        return asyncio.run(_await_function(function, trajectories, batch))
    return _call_function(function, trajectories, batch)
