"""One episode's environment in a process of its own: whatever it does, the run goes on."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from plimsoll.config.environment import EnvironmentConfig
from plimsoll.environment.adapters import EnvironmentFactory
from plimsoll.environment.local import EpisodeEnvironment
from plimsoll.environment.opening import load_functions, open_environment
from plimsoll.environment.results import READ, EnvironmentFailed, failure_of, method_of
from plimsoll.process.child import Child, ChildEnded, Pool, Program
from plimsoll.process.threads import in_thread
from plimsoll.reward.outcome import Failed

MethodCall = tuple[str, tuple[Any, ...]]
"""A method of the environment and its arguments; before `reset` a new environment is made."""


def environment_pool(config: EnvironmentConfig, size: int) -> Pool:
    """Return at most `size` processes, each for one episode at a time."""
    program = Program(
        open_in_process,
        what=f"The process for environment {config.name}",
        setup=config,
        codec="plimsoll.process.pickled",
        memory_gib=config.memory_gib,
    )
    return Pool(program, size)


def open_in_process(config: EnvironmentConfig) -> Callable[[MethodCall], object]:
    """Return what answers in the process: calls of methods, one episode after another."""
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
    """An environment in a process, held from the first call until it is closed."""

    pool: Pool
    seconds: float
    """How long one call may take."""
    _child: Child | None = None

    async def call(self, method: str, *arguments: object) -> Any:
        """Return what a method gave in the process; before `reset` one is taken."""
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
        """Give the process back, after the environment's own `close`."""
        if self._child is None:
            return
        try:
            if self._child.is_idle:
                await super().close()
        finally:
            self.pool.give_back(self._child)
            self._child = None
