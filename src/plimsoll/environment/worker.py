"""A process that plays the environments of episodes, one after another; started by apart.py."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from plimsoll.environment.adapters import EnvironmentFactory
from plimsoll.environment.apart import Question, Setup
from plimsoll.environment.opening import load_functions, open_environment
from plimsoll.environment.results import (
    failure_of,
    method_of,
    read_reset,
    read_reward,
    read_step,
)
from plimsoll.reward.functions.child import Opened, serve

_READ: dict[str, Callable[[Any], object]] = {
    "reset": read_reset,
    "step": read_step,
    "get_reward": read_reward,
    "close": lambda given: None,
}


class _Player:
    """Keeps an episode's environment between its calls, and the event loop of `async` ones."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._environment = make, None
        self._loop = asyncio.new_event_loop()

    def answer(self, question: Question) -> object:
        """What a method gave, or how it failed."""
        try:
            if question.method == "reset":
                self._environment = self._make()
            method = method_of(self._environment, question.method)
            given = None if method is None else method(*question.arguments)
            if inspect.isawaitable(given):
                given = self._loop.run_until_complete(given)
        except BaseException as error:  # noqa: BLE001  one's own code may do anything
            return failure_of(error)
        return _READ[question.method](given)


def _opened(setup: Setup) -> Opened:
    factory = open_environment(setup.name, load_functions(setup.tools))
    assert isinstance(factory, EnvironmentFactory), "the config was looked at before"
    return _Player(partial(factory.make, **setup.options)).answer, setup.memory_bytes


if __name__ == "__main__":
    serve(_opened)
