"""Adapters for reward functions that were written for other systems.

Each file of `plimsoll.interop.rewards` defines one adapter. This module lists that package by its
name and imports no file of it directly: to support another system, add a file there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from plimsoll.config.base import Choice
from plimsoll.config.choice import bind_options, resolve_choice
from plimsoll.config.files import load_named, nearest, values_in
from plimsoll.errors import ConfigError

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
