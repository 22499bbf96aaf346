"""One episode's environment, asked from the event loop: in this process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from plimsoll.environment.calls import (
    Answer,
    Begun,
    EnvironmentFailed,
    Rewarded,
    begun,
    method_of,
    raised,
    rewarded,
    stepped,
)
from plimsoll.environment.protocol import Reply
from plimsoll.environment.tool_environment import AsyncToolEnvironment, ToolEnvironment
from plimsoll.process.threads import in_thread
from plimsoll.reward.outcome import Failed

T = TypeVar("T")


class Seat(Protocol):
    """Each call raises EnvironmentFailed where it fails or takes too long. environment: the object
    that the episode is played with; None: it is in another process."""

    @property
    def environment(self) -> object: ...

    async def reset(self, row: Mapping[str, Any]) -> Begun: ...

    async def step(self, reply: Reply) -> Answer: ...

    async def reward(self) -> Rewarded: ...

    async def close(self) -> None:
        """Let go of what it holds; raises nothing."""
        ...


@dataclass
class Here:
    """In this process: plain methods in threads, `async` ones in the event loop. make: the object.
    seconds: for one call."""

    make: Callable[[], Any]
    seconds: float
    _made: Any = None

    @property
    def environment(self) -> object:
        made = self._made
        return made.inner if isinstance(made, ToolEnvironment | AsyncToolEnvironment) else made

    async def reset(self, row: Mapping[str, Any]) -> Begun:
        self._made = await self._asked("__init__", self.make)
        said = await self._asked("reset", self._made.reset, row)
        return _checked(begun(said))

    async def step(self, reply: Reply) -> Answer:
        return _checked(stepped(await self._asked("step", self._made.step, reply)))

    async def reward(self) -> Rewarded:
        get_reward = method_of(self._made, "get_reward")
        if get_reward is None:
            return None
        return _checked(rewarded(await self._asked("get_reward", get_reward)))

    async def close(self) -> None:
        close = method_of(self._made, "close")
        if close is None:
            return
        with suppress(EnvironmentFailed):  # the episode is over: nothing depends on this any more
            await self._asked("close", close)

    async def _asked(self, name: str, method: Callable[..., Any], *arguments: object) -> Any:
        try:
            async with asyncio.timeout(self.seconds):
                return await called(
                    partial(method, *arguments), inspect.iscoroutinefunction(method)
                )
        except TimeoutError:
            said = f"'s {name} took longer than call_seconds, which is {self.seconds:g}"
            raise EnvironmentFailed(Failed(said, unanswered=True)) from None


async def called(call: Callable[[], Any], in_loop: bool) -> Any:
    """What someone's own code gives, in the event loop where it is `async`, else in a thread.
    Raises EnvironmentFailed for what it raises."""
    if in_loop:
        return await _awaited(call())
    value = _checked(await in_thread(partial(_caught, call)))
    return await _awaited(value) if isinstance(value, Awaitable) else value


async def _awaited(work: Awaitable[Any]) -> Any:
    task = asyncio.current_task()
    try:
        return await work
    except BaseException as error:
        if task is not None and task.cancelling():
            raise
        raise EnvironmentFailed(raised(error)) from error


def _caught(call: Callable[[], T]) -> T | Failed:
    try:
        return call()
    except BaseException as error:  # noqa: BLE001  one's own code may do anything
        return raised(error)


def _checked(found: T | Failed) -> T:
    if isinstance(found, Failed):
        raise EnvironmentFailed(found)
    return found
