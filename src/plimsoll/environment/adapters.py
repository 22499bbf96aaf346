"""Makers of environments, agents, and adapters of environments written for other systems.

An adapter is a value in a file of `plimsoll.interop.environments`. This room looks
them up by the package's name and imports none, so supporting another system takes one more file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from plimsoll.config.files import nearest, values_in
from plimsoll.environment.protocol import Environment
from plimsoll.errors import ConfigError

if TYPE_CHECKING:  # the plan looks adapters up, and needs no schemas
    from plimsoll.environment.schemas import Tool

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
    episode's reward, None, or an `AgentResult` (agents/play.py)."""

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
