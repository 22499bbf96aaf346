"""One episode's environment, called from the event loop: in this process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from plimsoll.environment.protocol import Observation, Reply
from plimsoll.environment.results import (
    EnvironmentFailed,
    EpisodeReward,
    StepResult,
    failure_of,
    method_of,
    read_reset,
    read_reward,
    read_step,
)
from plimsoll.environment.tool_environment import ToolEnvironment
from plimsoll.process.threads import in_thread
from plimsoll.reward.outcome import Failed

T = TypeVar("T")


class EpisodeEnvironment(Protocol):
    """One episode's environment, wherever it is.

    Each call raises EnvironmentFailed if it fails or takes too long.
    """

    @property
    def environment(self) -> object:
        """The object that the episode is played with; None if it is in another process."""

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Begin."""
        ...

    async def step(self, reply: Reply) -> StepResult:
        """Answer a reply."""
        ...

    async def reward(self) -> EpisodeReward:
        """Return the reward of the whole episode."""
        ...

    async def close(self) -> None:
        """Release what the environment holds; raises nothing."""
        ...


@dataclass
class LocalEnvironment:
    """An `EpisodeEnvironment` in this process.

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

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Make the object, and begin an episode with it."""
        self._made = await self._call("__init__", self.make)
        return _or_raise(read_reset(await self._call("reset", self._made.reset, row)))

    async def step(self, reply: Reply) -> StepResult:
        """Answer a reply."""
        return _or_raise(read_step(await self._call("step", self._made.step, reply)))

    async def reward(self) -> EpisodeReward:
        """Return the reward of the whole episode; None if the object has no `get_reward`."""
        get_reward = method_of(self._made, "get_reward")
        if get_reward is None:
            return None
        return _or_raise(read_reward(await self._call("get_reward", get_reward)))

    async def close(self) -> None:
        """Call the object's `close`, if it has one; what that raises is dropped."""
        close = method_of(self._made, "close")
        if close is None:
            return
        with suppress(EnvironmentFailed):  # the episode is over: nothing depends on this any more
            await self._call("close", close)

    async def _call(self, name: str, method: Callable[..., Any], *arguments: object) -> Any:
        call, in_loop = partial(method, *arguments), inspect.iscoroutinefunction(method)
        try:
            async with asyncio.timeout(self.seconds):
                return await call_own_code(call, in_loop)
        except TimeoutError:
            why = f"'s {name} took longer than call_seconds, which is {self.seconds:g}"
            raise EnvironmentFailed(Failed(why, unanswered=True)) from None


async def call_own_code(call: Callable[[], Any], in_loop: bool) -> Any:
    """Return what a user's code gives. Raises EnvironmentFailed for what the code raises.

    Args:
        call: the code.
        in_loop: whether it is an `async def`, called in the event loop; other code runs in a
            thread.
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
