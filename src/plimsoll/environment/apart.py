"""One episode's environment in a process of its own: whatever it does, the run goes on."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from plimsoll.config.environment import EnvironmentConfig
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
from plimsoll.environment.opening import Factory, opened, opened_functions
from plimsoll.environment.protocol import Reply
from plimsoll.process.child import Child, ChildEnded, Program
from plimsoll.process.pool import Pool
from plimsoll.process.threads import in_thread
from plimsoll.reward.outcome import Failed

_READ: dict[str, Callable[[Any], object]] = {
    "reset": begun,
    "step": stepped,
    "get_reward": rewarded,
    "close": lambda given: None,
}


@dataclass(frozen=True)
class EnvironmentSetup:
    """The first message to a process: the environment to make, as the config names it."""

    name: str
    options: Mapping[str, Any]
    tools: tuple[str, ...]


@dataclass(frozen=True)
class MethodCall:
    """A call of a method of the environment. `reset` makes a new environment before."""

    method: str
    arguments: tuple[Any, ...] = ()


def environment_pool(config: EnvironmentConfig, size: int) -> Pool:
    """Return at most `size` processes, each for one episode at a time."""
    memory = None if config.memory_gib is None else int(config.memory_gib * 2**30)
    program = Program(
        open_environment,
        what=f"The process for environment {config.name}",
        setup=EnvironmentSetup(config.name, config.options, config.tools),
        codec="plimsoll.process.pickled",
        memory_bytes=memory,
    )
    return Pool(program, size)


def open_environment(setup: EnvironmentSetup) -> Callable[[MethodCall], object]:
    """Return what answers in the process: calls of methods, one episode after another."""
    factory = opened(setup.name, opened_functions(setup.tools))
    assert isinstance(factory, Factory), "the config was looked at before"
    return _Player(partial(factory, **setup.options)).answer


class _Player:
    """Keeps an episode's environment between its calls, and the event loop of `async` ones."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._environment = make, None
        self._loop = asyncio.new_event_loop()

    def answer(self, call: MethodCall) -> object:
        """Return what a method gave, or how it failed."""
        try:
            if call.method == "reset":
                self._environment = self._make()
            method = method_of(self._environment, call.method)
            value = None if method is None else method(*call.arguments)
            if inspect.isawaitable(value):
                value = self._loop.run_until_complete(value)
        except BaseException as error:  # noqa: BLE001  the user's code may do anything
            return raised(error)
        return _READ[call.method](value)


@dataclass
class Apart:
    """A `Seat` in a process, which it holds from the first call until it is closed."""

    pool: Pool
    seconds: float
    """How long one call may take."""
    environment: object = None
    _child: Child | None = None

    async def reset(self, row: Mapping[str, Any]) -> Begun:
        self._child = await in_thread(self.pool.take, self.pool.give_back)
        begun_: Begun = await self._call(MethodCall("reset", (row,)))
        return begun_

    async def step(self, reply: Reply) -> Answer:
        answer: Answer = await self._call(MethodCall("step", (reply,)))
        return answer

    async def reward(self) -> Rewarded:
        reward: Rewarded = await self._call(MethodCall("get_reward"))
        return reward

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        try:
            if child.is_idle:
                with suppress(EnvironmentFailed):  # the episode is over: nothing depends on this
                    await self._ask(child, MethodCall("close"))
        finally:
            self.pool.give_back(child)

    async def _call(self, call: MethodCall) -> Any:
        assert self._child is not None, "reset comes first"
        return await self._ask(self._child, call)

    async def _ask(self, child: Child, call: MethodCall) -> Any:
        try:
            answer = await in_thread(partial(child.ask, call, self.seconds))
        except TimeoutError:
            said = f"'s {call.method} took longer than call_seconds, which is {self.seconds:g}"
            said += "; its process was ended"
            raise EnvironmentFailed(Failed(said, unanswered=True)) from None
        except ChildEnded as ended:
            raise EnvironmentFailed(Failed(f"'s process {ended}", ended.lines)) from None
        if isinstance(answer, Failed):
            raise EnvironmentFailed(answer)
        return answer
