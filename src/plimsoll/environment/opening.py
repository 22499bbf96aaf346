"""From an environment's name to what makes one for each episode.

| name | what it is |
| --- | --- |
| `calculator` | a file of `environment/library/` |
| `my.module:MyEnvironment` | a class, or a function that makes an object, by import path |
| `path/to/file.py:MyEnvironment` | the same, by the file's path |
| `path/to/agent.py` | an agent file of OpenRLHF |
| `file.py:play` | an agent: a function with the parameters `base_url` and `api_key` (agents/) |
| `verifiers:TASKSET` | an environment of verifiers (verifiers/) |

A class with `reset` and `step` is an environment as it is; one with `reset` and further public
methods has these as its tools (tool_environment.py), with the functions that are named beside it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

from plimsoll.config.files import load_named, nearest
from plimsoll.environment import library
from plimsoll.environment.openrlhf import AgentExecutorBase, OpenRlhfEnvironment, load_agent
from plimsoll.environment.protocol import Environment
from plimsoll.environment.schemas import Tool
from plimsoll.environment.tool_environment import (
    Function,
    functions_of,
    no_tool,
    tool_environment,
    toolbox,
)
from plimsoll.environment.verifiers.process import VerifiersEnvironment
from plimsoll.environment.verifiers.venv import PREFIX
from plimsoll.errors import ConfigError


@dataclass(frozen=True)
class Factory:
    """Makes an environment for one episode. tools: those that are known before there is one.
    keeps_end: it wants replies with the token that ends a turn."""

    name: str
    make: Callable[..., Environment]
    tools: tuple[Tool, ...] = ()
    keeps_end: bool = False

    def __call__(self, **options: Any) -> Environment:
        return self.make(**options)

    def check(self, options: Mapping[str, Any]) -> None:
        """Raises ConfigError for an option that is not known, and for one that is missing."""
        parameters = inspect.signature(self.make).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            for name in options:
                if name not in parameters:
                    raise ConfigError(
                        f"The environment {self.name!r} has no option {name!r}."
                        f"{nearest(name, parameters)} Its options: "
                        f"{', '.join(parameters) or 'none'} (the parameters of what makes it)."
                    )
        try:
            inspect.signature(self.make).bind(**options)
        except TypeError as error:
            raise ConfigError(
                f"The environment {self.name!r} cannot be made: {error}. Give it as an option."
            ) from error


@dataclass(frozen=True)
class AgentFunction:
    """Plays whole episodes by calls of the policy's endpoint."""

    name: str
    play: Callable[..., Any]

    def check(self, options: Mapping[str, Any]) -> None:
        """Raises ConfigError as of a `Factory`."""
        try:
            inspect.signature(self.play).bind({}, **dict.fromkeys(_ADDRESS, ""), **options)
        except TypeError as error:
            raise ConfigError(
                f"The agent {self.name!r} cannot be called as play(row, base_url=..., api_key=..., "
                f"**options): {error}."
            ) from error


_ADDRESS = ("base_url", "api_key")


def opened(
    name: str, functions: Sequence[Function] = ()
) -> Factory | AgentFunction | AgentExecutorBase | VerifiersEnvironment:
    """What makes the environment of a name; or what plays whole episodes itself: an agent, or an
    executor of OpenRLHF's (agents/executor.py). functions: further tools, beside its own.

    Raises ConfigError for a name that nothing has, what cannot be imported or loaded, and a class
    that is no environment.
    """
    if name.startswith(PREFIX):
        _no_functions(name, functions)
        return VerifiersEnvironment(name.removeprefix(PREFIX))
    if ":" in name:
        return _factory(name, _named(name), functions)
    if name.endswith(".py"):
        _no_functions(name, functions)
        return _agent(name)
    known = sorted(module.name for module in pkgutil.iter_modules(library.__path__))
    if name not in known:
        raise ConfigError(
            f"No environment is called {name!r}.{nearest(name, known)} Known: {', '.join(known)}. "
            f"One of your own is chosen as my.module:MyEnvironment or path/to/file.py:"
            f"MyEnvironment, an agent file of OpenRLHF as path/to/agent.py."
        )
    own = vars(importlib.import_module(f"{library.__name__}.{name}"))
    return _factory(name, own.get(_class_name(name)) or own[name], functions)


def opened_functions(names: Iterable[str]) -> list[Function]:
    """Plain functions as tools, each by `my.module:function` or `path/to/file.py:function`.

    Raises ConfigError for what cannot be found, and for a function that cannot be a tool.
    """
    found: list[Function] = []
    for name in names:
        function = _named(name)
        if not inspect.isroutine(function):
            raise ConfigError(f"{name!r} names a {type(function).__name__}, and no function.")
        found.append(function)
    toolbox(found)
    return found


def _class_name(file: str) -> str:
    return "".join(part.title() for part in file.split("_"))


def _named(name: str) -> Any:
    """What a module or a file has by a name."""
    try:
        return load_named(name)
    except ConfigError as error:
        place = name.rpartition(":")[0]
        lacking = isinstance(error.__cause__, ModuleNotFoundError) and "'openrlhf" in str(error)
        if not (lacking and place.endswith(".py")):
            raise
        raise ConfigError(f"{error} An agent file of OpenRLHF is named alone: {place}.") from error


def _agent(path: str) -> Factory | AgentExecutorBase:
    agent = load_agent(path)
    if isinstance(agent, AgentExecutorBase):
        return agent
    kind = agent

    def make(sampling: Mapping[str, Any] | None = None) -> Environment:
        return OpenRlhfEnvironment(kind(), sampling or {})

    return Factory(path, make, keeps_end=True)


def _factory(name: str, target: Any, functions: Sequence[Function]) -> Factory | AgentFunction:
    if inspect.isfunction(target) and {*_ADDRESS} <= {*inspect.signature(target).parameters}:
        _no_functions(name, functions)
        return AgentFunction(name, target)
    if not inspect.isclass(target):
        if not callable(target):
            raise ConfigError(
                f"{name!r} names a {type(target).__name__}. Name a class, or a function that makes "
                f"an environment."
            )
        return Factory(name, _adapting(target, name, functions))
    if _plays(target, name):
        _no_functions(name, functions)
        return Factory(name, cast(Callable[..., Environment], target))
    tools = toolbox([*functions, *functions_of(target)])
    if not tools.schemas:
        raise no_tool(target)
    return Factory(name, _adapting(target, name, functions), tools.schemas)


def _adapting(make: Callable[..., Any], name: str, functions: Sequence[Function]) -> Any:
    """Makes what `make` makes an environment; of the same parameters."""

    @wraps(make)
    def adapted(**options: Any) -> Environment:
        inner = make(**options)
        if _plays(inner, name):
            _no_functions(name, functions)
            whole: Environment = inner
            return whole
        return tool_environment(inner, functions)

    return adapted


def _plays(target: object, name: str) -> bool:
    """Whether it is an environment as it is; False: its methods are tools. Raises ConfigError for
    what is neither."""
    reset, step = (callable(getattr(target, method, None)) for method in ("reset", "step"))
    if not reset:
        kind = target.__name__ if inspect.isclass(target) else type(target).__name__
        raise ConfigError(
            f"{name!r}: {kind} has no method `reset`. An environment has `reset` and `step`; or "
            f"`reset` and further public methods, which are the policy's tools."
        )
    return step


def _no_functions(name: str, functions: Sequence[Function]) -> None:
    if functions:
        raise ConfigError(
            f"{name!r} carries out tool calls itself, if any: leave the functions "
            f"out that are given as tools beside it."
        )
