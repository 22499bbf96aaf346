"""Python functions as rewards: called in threads, as coroutines, or in processes of their own.

A function that harms its own process does not harm the run.

Functions that were written for other systems are adapted. Each file of `plimsoll.interop.rewards`
defines one adapter. This module lists that package by its name and imports no file of it directly:
to support another system, add a file there.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, get_origin, get_type_hints

from plimsoll.config.base import Choice
from plimsoll.config.choice import bind_options, resolve_choice
from plimsoll.config.files import load_named, nearest, values_in
from plimsoll.config.reward import RewardConfig
from plimsoll.errors import ConfigError
from plimsoll.machine.faults import await_fault_point, fault_value
from plimsoll.process.child import ChildEnded, Pool, Program
from plimsoll.process.threads import in_thread
from plimsoll.records import Trajectory
from plimsoll.reward.outcome import Failed, Outcome, TimeLimit, error_outcome, number, numbers

REWARDS = "plimsoll.reward"
ADAPTERS = "plimsoll.interop.rewards"

RewardFunction = Callable[..., Any]
"""Takes a trajectory or a list of trajectories by position, and options by keyword."""


@dataclass(frozen=True)
class RewardAdapter:
    """An adapter that turns another system's reward functions into Plimsoll rewards."""

    name: str
    """The `name` in a config that selects this adapter; `options.path` is the function's file."""
    function: str
    """The name of the function in the file, if `options.function` is not given."""
    recognises: Callable[[Collection[str]], bool]
    """Takes a function's parameter names; returns whether it is written for this system."""
    adapt: Callable[[Callable[..., Any]], RewardFunction]
    """Takes a function of that system; returns the Plimsoll reward."""


@cache
def reward_adapters() -> tuple[RewardAdapter, ...]:
    """Return the adapters of all systems."""
    return values_in(ADAPTERS, "ADAPTER")


def named_adapter(name: str) -> RewardAdapter | None:
    """Return the adapter with a name, or None if no adapter has it."""
    return next((adapter for adapter in reward_adapters() if adapter.name == name), None)


def reward_function(choice: Choice) -> partial[Any]:
    """Return the function that a reward's config names, with its options bound.

    The function may be an `async def`. Raises ConfigError if the name or an option is wrong.
    """
    adapter = named_adapter(choice.name)
    if adapter is None:
        try:
            return resolve_choice(
                choice, REWARDS, "reward", awaited=True, adapted=_adapt_if_foreign
            )
        except ConfigError as error:
            names = [] if ":" in choice.name else [known.name for known in reward_adapters()]
            raise ConfigError(f"{error}{nearest(choice.name, names)}") from error
    options = dict(choice.options)
    path, function = options.pop("path", None), options.pop("function", adapter.function)
    if not isinstance(path, str):
        raise ConfigError(f"{choice.name!r} needs the option 'path': the function's file.")
    target = load_named(f"{path}:{function}")
    if not callable(target):
        raise ConfigError(f"{path}:{function} is a {type(target).__name__}, and not a function.")
    chosen = choice.model_copy(update={"options": options})
    return bind_options(chosen, adapter.adapt(target), "reward")


def check_call(function: Callable[..., Any], system: str, *values: str, **named: str) -> None:
    """Raise ConfigError if a function cannot take the arguments that its system gives."""
    try:
        inspect.signature(function).bind(*values, **named)
    except TypeError as error:
        given = ", ".join((*values, *named))
        raise ConfigError(
            f"{function.__name__} is called with {given}, as by {system}, and cannot be: {error}. "
            f"Give it these parameters, or **kwargs."
        ) from error


def _adapt_if_foreign(function: Callable[..., Any]) -> RewardFunction:
    names = inspect.signature(function).parameters
    matching = (adapter for adapter in reward_adapters() if adapter.recognises(names))
    adapter = next(matching, None)
    return function if adapter is None else adapter.adapt(function)


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


@dataclass(frozen=True)
class FunctionHere:
    """Calls a reward function in this process."""

    function: Function
    batch: bool
    """Whether the function takes a list."""
    coroutine: bool
    """Whether the function is an `async def`."""
    limit: TimeLimit
    """The longest time of a call."""

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        """Return an outcome for each trajectory: failures if the function takes too long."""
        if self.coroutine:
            work, left = _await_function(self.function, trajectories, self.batch), ""
        else:
            work = in_thread(partial(_call_function, self.function, trajectories, self.batch))
            left = "; its thread goes on, as nothing can end it (process: true makes it a process)"
        try:
            async with asyncio.timeout(self.limit.seconds):
                return await work
        except TimeoutError:
            return [self.limit.failure(after=left)] * len(trajectories)


@dataclass(frozen=True)
class FunctionInProcesses:
    """Calls a reward function in processes of a pool, one list of trajectories per call."""

    pool: Pool
    limit: TimeLimit

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        """Return an outcome for each trajectory: failures if the process did not answer in time.

        Raises PlimsollError if no process can be started.
        """
        sent = [replace(t, transcript=None) for t in trajectories]
        try:
            outcomes: Sequence[Outcome] = await in_thread(
                partial(self.pool.ask, sent, self.limit.seconds)
            )
        except TimeoutError:
            failed = self.limit.failure(after="; its process was ended")
        except ChildEnded as ended:
            failed = Failed(f"'s process {ended}", ended.lines)
        else:
            return outcomes
        return [failed] * len(trajectories)


def open_in_processes(
    config: RewardConfig, batch: bool, limit: TimeLimit, size: int, stack: AsyncExitStack
) -> FunctionInProcesses:
    """Return an object that calls a config's function in at most `size` processes.

    Closing `stack` ends the processes. `batch` says whether the function takes a list.
    """
    program = Program(
        open_function,
        what=f"The process for reward function {config.name}",
        setup=(config, batch),
        codec="plimsoll.process.pickled",
        memory_gib=config.memory_gib,
    )
    pool = Pool(program, size)
    stack.callback(pool.close)
    return FunctionInProcesses(pool, limit)


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
