"""One episode's environment in a process of its own: whatever it does, the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from plimsoll.config.base import OptionValue
from plimsoll.environment.protocol import Reply
from plimsoll.environment.results import (
    EnvironmentFailed,
    EpisodeReward,
    ResetResult,
    StepResult,
)
from plimsoll.reward.functions.children import Child, ChildEnded, Children
from plimsoll.reward.outcome import Failed


@dataclass(frozen=True)
class Setup:
    """The first message to a process: what to make, as the config names it.

    memory_bytes: what it may take beyond what it has once that is loaded.
    """

    name: str
    options: Mapping[str, OptionValue]
    tools: tuple[str, ...]
    memory_bytes: int | None


@dataclass(frozen=True)
class Question:
    """method: of the environment. A `reset` makes a new one."""

    method: str
    arguments: tuple[Any, ...] = ()


def processes(setup: Setup, size: int) -> Children:
    """So many processes at most, each for one episode at a time."""
    return Children("plimsoll.environment.worker", f"environment {setup.name}", setup, size)


@dataclass
class Apart:
    """An `EpisodeEnvironment`: a process from its first call until it is closed.

    seconds: for one call.
    """

    children: Children
    seconds: float
    environment: object = None
    _held: AsyncExitStack = field(default_factory=AsyncExitStack)
    _child: Child | None = None

    async def reset(self, row: Mapping[str, Any]) -> ResetResult:
        self._child = await self._held.enter_async_context(self.children.one())
        found: ResetResult = await self._asked(Question("reset", (row,)))
        return found

    async def step(self, reply: Reply) -> StepResult:
        found: StepResult = await self._asked(Question("step", (reply,)))
        return found

    async def reward(self) -> EpisodeReward:
        found: EpisodeReward = await self._asked(Question("get_reward"))
        return found

    async def close(self) -> None:
        if self._child is not None and self._child.answers:
            with suppress(EnvironmentFailed):  # the episode is over: nothing depends on this
                await self._asked(Question("close"))
        await self._held.aclose()

    async def _asked(self, question: Question) -> Any:
        assert self._child is not None, "reset comes first"
        try:
            found = await self._child.ask(question, self.seconds)
        except TimeoutError:
            said = f"'s {question.method} took longer than call_seconds, which is {self.seconds:g}"
            said += "; its process was ended"
            raise EnvironmentFailed(Failed(said, unanswered=True)) from None
        except ChildEnded as ended:
            raise EnvironmentFailed(Failed(f"'s process {ended}")) from None
        if isinstance(found, Failed):
            raise EnvironmentFailed(found)
        return found
