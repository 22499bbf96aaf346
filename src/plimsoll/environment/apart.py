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


MethodCall = tuple[str, tuple[Any, ...]]
"""A method of the environment and its arguments; before `reset` a new environment is made."""


def environment_pool(config: EnvironmentConfig, size: int) -> Pool:
    """Return at most `size` processes, each for one episode at a time."""
    program = Program(
        open_environment,
        what=f"The process for environment {config.name}",
        setup=config,
        codec="plimsoll.process.pickled",
        memory_gib=config.memory_gib,
    )
    return Pool(program, size)


def open_environment(config: EnvironmentConfig) -> Callable[[MethodCall], object]:
    """Return what answers in the process: calls of methods, one episode after another."""
    factory = opened(config.name, opened_functions(config.tools))
    assert isinstance(factory, Factory), "the config was looked at before"
    return _Player(partial(factory, **config.options)).answer


class _Player:
    """Keeps an episode's environment between its calls, and the event loop of `async` ones."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._environment = make, None
        self._loop = asyncio.new_event_loop()

    def answer(self, call: MethodCall) -> object:
        """Return what a method gave, or how it failed."""
        name, arguments = call
        try:
            if name == "reset":
                self._environment = self._make()
            method = method_of(self._environment, name)
            value = None if method is None else method(*arguments)
            if inspect.isawaitable(value):
                value = self._loop.run_until_complete(value)
        except BaseException as error:  # noqa: BLE001  the user's code may do anything
            return raised(error)
        return _READ[name](value)


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
        begun_: Begun = await self._ask("reset", row)
        return begun_

    async def step(self, reply: Reply) -> Answer:
        answer: Answer = await self._ask("step", reply)
        return answer

    async def reward(self) -> Rewarded:
        reward: Rewarded = await self._ask("get_reward")
        return reward

    async def close(self) -> None:
        if self._child is None:
            return
        try:
            if self._child.is_idle:
                with suppress(EnvironmentFailed):  # the episode is over: nothing depends on this
                    await self._ask("close")
        finally:
            self.pool.give_back(self._child)
            self._child = None

    async def _ask(self, method: str, *arguments: object) -> Any:
        assert self._child is not None, "reset comes first"
        try:
            call = (method, arguments)
            answer = await in_thread(partial(self._child.ask, call, self.seconds))
        except TimeoutError:
            said = f"'s {method} took longer than call_seconds, which is {self.seconds:g}"
            said += "; its process was ended"
            raise EnvironmentFailed(Failed(said, unanswered=True)) from None
        except ChildEnded as ended:
            raise EnvironmentFailed(Failed(f"'s process {ended}", ended.lines)) from None
        if isinstance(answer, Failed):
            raise EnvironmentFailed(answer)
        return answer
