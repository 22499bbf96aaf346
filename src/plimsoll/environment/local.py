"""Call one episode's environment from the event loop: in this process, or in a process of its own.

If an environment in its own process crashes, the run does not end.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from plimsoll.config.rollout import EnvironmentConfig
from plimsoll.environment.opening import EnvironmentFactory, load_functions, open_environment
from plimsoll.environment.protocol import (
    READ,
    EnvironmentFailed,
    EpisodeReward,
    Observation,
    Reply,
    StepResult,
    failure_of,
    method_of,
)
from plimsoll.environment.tool_environment import ToolEnvironment
from plimsoll.machine.faults import await_fault_point
from plimsoll.process.child import Child, ChildEnded, Pool, Program
from plimsoll.process.threads import in_thread
from plimsoll.reward.outcome import Failed

T = TypeVar("T")


class EpisodeEnvironment(ABC):
    """One episode's environment, in this process or another.

    Each method raises EnvironmentFailed if the environment fails or takes too long.
    """

    @property
    def environment(self) -> object:
        """The object that the episode is played with; None if it is in another process."""
        return None

    @abstractmethod
    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the object; return its result as `READ` parses it.

        `reset` makes a new object first.
        """

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Begin an episode about a row; return the first messages and the tools."""
        observation: Observation = await self.call("reset", row)
        return observation

    async def step(self, reply: Reply) -> StepResult:
        """Return the environment's answer to a reply."""
        result: StepResult = await self.call("step", reply)
        return result

    async def reward(self) -> EpisodeReward:
        """Return the reward of the whole episode; None if the object has no `get_reward`."""
        reward: EpisodeReward = await self.call("get_reward")
        return reward

    async def close(self) -> None:
        """Call the object's `close`, if it has one, and ignore its errors."""
        with suppress(EnvironmentFailed):  # the episode is over: nothing depends on this any more
            await self.call("close")


@dataclass
class LocalEnvironment(EpisodeEnvironment):
    """An environment in this process.

    Plain methods are called in threads, `async` ones in the event loop.
    """

    make: Callable[[], Any]
    """A function that makes the object."""
    seconds: float
    """How long a call may take."""
    _made: Any = None

    @property
    def environment(self) -> object:
        """The object that was made, without the wrapper around its tools."""
        wrapped = self._made
        return wrapped.inner if isinstance(wrapped, ToolEnvironment) else wrapped

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the object; return its result as `READ` parses it."""
        if method == "reset":
            self._made = await self._call("__init__", self.make)
        own = method_of(self._made, method)
        given = None if own is None else await self._call(method, own, *arguments)
        return _or_raise(READ[method](given))

    async def _call(self, name: str, method: Callable[..., Any], *arguments: object) -> Any:
        call, in_loop = partial(method, *arguments), inspect.iscoroutinefunction(method)
        try:
            async with asyncio.timeout(self.seconds):
                await _await_own(await_fault_point("environment.call"))
                return await call_own_code(call, in_loop)
        except TimeoutError:
            why = f"'s {name} took longer than call_seconds, which is {self.seconds:g}"
            raise EnvironmentFailed(Failed(why, unanswered=True)) from None


async def call_own_code(call: Callable[[], Any], in_loop: bool) -> Any:
    """Call a user's code and return its result. Raises EnvironmentFailed if the code raises.

    With `in_loop` (for an `async def`) the code runs in the event loop, otherwise in a thread.
    """
    if in_loop:
        return await _await_own(call())
    value = _or_raise(await in_thread(partial(_catch_all, call)))
    return await _await_own(value) if isinstance(value, Awaitable) else value


async def _await_own(work: Awaitable[Any]) -> Any:
    task = asyncio.current_task()
    try:
        return await work
    except BaseException as error:
        if task is not None and task.cancelling():
            raise
        raise EnvironmentFailed(failure_of(error)) from error


def _catch_all(call: Callable[[], T]) -> T | Failed:
    try:
        return call()
    except BaseException as error:  # noqa: BLE001  one's own code may do anything
        return failure_of(error)


def _or_raise(result: T | Failed) -> T:
    if isinstance(result, Failed):
        raise EnvironmentFailed(result)
    return result


MethodCall = tuple[str, tuple[Any, ...]]
"""The name of an environment's method and its arguments. `reset` makes a new environment first."""


def environment_pool(config: EnvironmentConfig, size: int) -> Pool:
    """Return a pool of at most `size` processes, each for one episode at a time."""
    program = Program(
        open_in_process,
        what=f"The process for environment {config.name}",
        setup=config,
        codec="pickle",
        memory_gib=config.memory_gib,
    )
    return Pool(program, size)


def open_in_process(config: EnvironmentConfig) -> Callable[[MethodCall], object]:
    """Return the process's function that calls a method and returns its result or a `Failed`."""
    factory = open_environment(config.name, load_functions(config.tools))
    assert isinstance(factory, EnvironmentFactory), "the config was looked at before"
    loop, environment = asyncio.new_event_loop(), None

    def answer(call: MethodCall) -> object:
        nonlocal environment
        name, arguments = call
        try:
            if name == "reset":
                environment = factory.make(**config.options)
            method = method_of(environment, name)
            value = None if method is None else method(*arguments)
            if inspect.isawaitable(value):
                value = loop.run_until_complete(value)
        except BaseException as error:  # noqa: BLE001  the user's code may do anything
            return failure_of(error)
        return READ[name](value)

    return answer


@dataclass
class Apart(EpisodeEnvironment):
    """An environment in a process of the pool, which it keeps from `reset` until `close`."""

    pool: Pool
    seconds: float
    """How long one call may take."""
    _child: Child | None = None

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method in the process and return its result; `reset` takes a process first."""
        if method == "reset":
            self._child = await in_thread(self.pool.take, self.pool.give_back)
        assert self._child is not None, "reset comes first"
        try:
            answer = await in_thread(partial(self._child.ask, (method, arguments), self.seconds))
        except TimeoutError:
            why = f"'s {method} took longer than call_seconds, which is {self.seconds:g}"
            why += "; its process was ended"
            raise EnvironmentFailed(Failed(why, unanswered=True)) from None
        except ChildEnded as ended:
            raise EnvironmentFailed(Failed(f"'s process {ended}", ended.lines)) from None
        if isinstance(answer, Failed):
            raise EnvironmentFailed(answer)
        return answer

    async def close(self) -> None:
        """Call the environment's `close`, then give the process back to the pool."""
        if self._child is None:
            return
        try:
            if self._child.is_idle:
                await super().close()
        finally:
            self.pool.give_back(self._child)
            self._child = None
