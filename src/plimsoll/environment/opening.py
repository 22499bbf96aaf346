"""Find the environment or agent that a name in the config means.

| name | what it is |
| --- | --- |
| `calculator` | a file of `environment/library/` |
| `my.module:MyEnvironment` | a class, or a function that makes an object, by import path |
| `path/to/file.py:MyEnvironment` | the same, by the file's path |
| `file.py:play` | an agent: a function with the parameters `base_url` and `api_key` (agents.py) |
| what an adapter recognises | an environment of another system |

A class with `reset` and `step` is used as it is. In a class with `reset` but no `step`, the other
public methods are the policy's tools, and so are the functions in `tools` (tool_environment.py).

An adapter is a value in a file of `plimsoll.interop.environments`. Adapters are found by that
package's name, and none is imported here, so supporting another system takes one more file.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, cast

from plimsoll.config.files import load_named, modules_in, nearest, values_in
from plimsoll.environment import library
from plimsoll.environment.protocol import Environment
from plimsoll.environment.tool_environment import (
    ToolEnvironment,
    ToolFunction,
    toolbox,
    toolbox_of,
)
from plimsoll.errors import ConfigError

if TYPE_CHECKING:
    from plimsoll.environment.tool_calls import Tool


ADAPTERS = "plimsoll.interop.environments"
ADDRESS = ("base_url", "api_key")
"""The parameters by which an agent gets the address of the policy."""


@dataclass(frozen=True)
class EnvironmentFactory:
    """The maker of an environment for one episode, which answers turn by turn."""

    name: str
    """The environment's name in the config."""
    make: Callable[..., Environment]
    """A function of the options that makes the environment."""
    tools: tuple[Tool, ...] = ()
    """The tools that are known before there is an environment."""
    keeps_end: bool = False
    """Whether the environment wants replies with the token that ends a turn."""

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise ConfigError if an option is unknown or missing."""
        parameters = inspect.signature(self.make).parameters
        is_open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        unknown = [] if is_open else [name for name in options if name not in parameters]
        if unknown:
            raise ConfigError(
                f"The environment {self.name!r} has no option {unknown[0]!r}."
                f"{nearest(unknown[0], parameters)} Its options: "
                f"{', '.join(parameters) or 'none'} (the parameters of what makes it)."
            )
        try:
            inspect.signature(self.make).bind(**options)
        except TypeError as error:
            raise ConfigError(
                f"The environment {self.name!r} cannot be made: {error}. Give it as an option."
            ) from error


@dataclass(frozen=True)
class EpisodeAgent:
    """An agent, which plays an episode by calls of the policy's endpoint."""

    name: str
    """The agent's name in the config."""
    play: Callable[..., Any]
    """Called as `play(row, base_url=..., api_key=..., **options)`, plain or `async`. It gives the
    episode's reward, None, or an `AgentResult` (agents.py)."""

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise ConfigError if an option is unknown, missing or wrong."""
        try:
            inspect.signature(self.play).bind({}, **dict.fromkeys(ADDRESS, ""), **options)
        except TypeError as error:
            raise ConfigError(
                f"The agent {self.name!r} cannot be called as play(row, base_url=..., api_key=..., "
                f"**options): {error}."
            ) from error


@dataclass(frozen=True)
class EnvironmentAdapter:
    """How environments of another system are played."""

    what: str
    """What the adapter opens, for messages: `an agent file of OpenRLHF`."""
    example: str
    """An example of a `name` in the config that this adapter recognises."""
    recognises: Callable[[str], bool]
    """A function that returns whether a config's `name` is for this adapter."""
    open: Callable[[str], EnvironmentFactory | EpisodeAgent]
    """A function that opens the environment of a name, or raises ConfigError."""


@cache
def environment_adapters() -> tuple[EnvironmentAdapter, ...]:
    """Return the adapters of all systems."""
    return values_in(ADAPTERS, "ADAPTER")


def find_adapter(name: str) -> EnvironmentAdapter | None:
    """Return the adapter that recognises a config's `name`; None if no adapter does."""
    return next((adapter for adapter in environment_adapters() if adapter.recognises(name)), None)


def open_environment(
    name: str, functions: Sequence[ToolFunction] = ()
) -> EnvironmentFactory | EpisodeAgent:
    """Return the environment's factory, or the agent, for a name of the table above.

    `functions` are further tools, in addition to the environment's methods.
    Raises ConfigError if the name is unknown or cannot be imported, or if the class is not an
    environment.
    """
    if (adapter := find_adapter(name)) is not None:
        _refuse_functions(name, functions)
        return adapter.open(name)
    if ":" in name:
        return _open_target(name, _load(name), functions)
    known = modules_in(library.__name__)
    if name not in known:
        examples = ", ".join(
            f"{adapter.what} as {adapter.example}" for adapter in environment_adapters()
        )
        raise ConfigError(
            f"No environment is called {name!r}.{nearest(name, known)} Known: {', '.join(known)}. "
            f"Name one of your own as my.module:MyEnvironment or path/to/file.py:MyEnvironment, "
            f"{examples}."
        )
    members = vars(importlib.import_module(f"{library.__name__}.{name}"))
    class_name = "".join(part.title() for part in name.split("_"))
    return _open_target(name, members.get(class_name) or members[name], functions)


def load_functions(names: Iterable[str]) -> list[ToolFunction]:
    """Return the functions of the names `my.module:function` or `path/to/file.py:function`.

    Raises ConfigError if a name cannot be loaded, or its function cannot be a tool.
    """
    functions: list[ToolFunction] = []
    for name in names:
        function = _load(name)
        if not inspect.isroutine(function):
            raise ConfigError(f"{name!r} names a {type(function).__name__}, and not a function.")
        functions.append(function)
    toolbox(functions)
    return functions


def _load(name: str) -> Any:
    try:
        return load_named(name)
    except ConfigError as error:
        file = name.rpartition(":")[0]
        adapter = find_adapter(file)
        if adapter is None or not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        raise ConfigError(f"{error} If it is {adapter.what}, name it alone: {file}.") from error


def _open_target(
    name: str, target: Any, functions: Sequence[ToolFunction]
) -> EnvironmentFactory | EpisodeAgent:
    if inspect.isfunction(target) and {*ADDRESS} <= {*inspect.signature(target).parameters}:
        _refuse_functions(name, functions)
        return EpisodeAgent(name, target)
    if inspect.isclass(target) and _is_environment(target, name, functions):
        return EnvironmentFactory(name, cast(Callable[..., Environment], target))
    if not callable(target):
        raise ConfigError(
            f"{name!r} names a {type(target).__name__}. Name a class, or a function that makes "
            f"an environment."
        )
    schemas = toolbox_of(target, functions).schemas if inspect.isclass(target) else ()
    return EnvironmentFactory(name, _with_tools(target, name, functions), schemas)


def _with_tools(make: Callable[..., Any], name: str, functions: Sequence[ToolFunction]) -> Any:
    """Return a function with the parameters of `make` that wraps its object if it has no `step`."""

    @wraps(make)
    def make_environment(**options: Any) -> Environment:
        made = make(**options)
        if _is_environment(made, name, functions):
            return cast(Environment, made)
        return ToolEnvironment(made, functions)

    return make_environment


def _is_environment(target: object, name: str, functions: Sequence[ToolFunction]) -> bool:
    """Return whether a class or object has `step`; otherwise its methods are tools.

    Raises ConfigError if it has no `reset`, and for functions beside `step`.
    """
    reset, step = (callable(getattr(target, method, None)) for method in ("reset", "step"))
    if not reset:
        kind = target.__name__ if inspect.isclass(target) else type(target).__name__
        raise ConfigError(
            f"{name!r}: {kind} has no method `reset`. An environment has `reset` and `step`; or "
            f"`reset` and further public methods, which are the policy's tools."
        )
    if step:
        _refuse_functions(name, functions)
    return step


def _refuse_functions(name: str, functions: Sequence[ToolFunction]) -> None:
    if functions:
        raise ConfigError(
            f"{name!r} carries out tool calls itself, if any: leave the functions out that `tools` "
            f"names beside it."
        )
