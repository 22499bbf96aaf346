"""Run an episode's environment in a separate process, so that its crash does not end the run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from plimsoll.config.rl import EnvironmentConfig
from plimsoll.environment.adapters import EnvironmentFactory
from plimsoll.environment.local import EpisodeEnvironment
from plimsoll.environment.opening import load_functions, open_environment
from plimsoll.environment.results import READ, EnvironmentFailed, failure_of, method_of
from plimsoll.process.child import Child, ChildEnded, Pool, Program
from plimsoll.process.threads import in_thread
from plimsoll.reward.outcome import Failed

MethodCall = tuple[str, tuple[Any, ...]]
"""The name of an environment's method and its arguments. `reset` makes a new environment first."""


def environment_pool(config: EnvironmentConfig, size: int) -> Pool:
    """Return a pool of at most `size` processes, each for one episode at a time."""
    program = Program(
        open_in_process,
        what=f"The process for environment {config.name}",
        setup=config,
        codec="plimsoll.process.pickled",
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
