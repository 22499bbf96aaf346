"""The interface of environments: begin an episode, then answer the policy's replies.

    class Echo:
        def reset(self, row):            # the beginning: text, messages, or an Observation
            self.wanted = row["reference"]
            return "Say it."
        def step(self, reply):           # (the answer, whether the episode is over)
            return "Try again.", reply.text.strip() == self.wanted
        def get_reward(self):            # once the episode is over; may be left out
            return 1.0
        def close(self): ...             # may be left out

Each method may be plain or `async`. The messages that `reset` returns follow the row's messages.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


async def await_if_needed(given: Any) -> Any:
    """Return the result of a method: `given` itself, or what awaiting it gives."""
    return await given if inspect.isawaitable(given) else given


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    """The tool's name."""
    arguments: Mapping[str, Any]
    """The arguments by name."""
    id: str = ""
    """The call's id, unique in the episode: the policy's if it wrote one, else nine letters and
    digits; "" before it is set."""


@dataclass(frozen=True)
class Message:
    """A message of one side of a conversation."""

    role: str
    """`system`, `user`, `assistant` or `tool`; or `raw`: text without the chat template."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    """The tool whose result this is."""
    call_id: str = ""
    """The call that this answers. Results without one answer the calls in their order."""


@dataclass(frozen=True)
class Observation:
    """Messages and tools for the policy, from `reset` or `step`."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """The schemas of the tools that the policy may call."""


EnvironmentOutput = str | Message | list[Message] | Observation
"""The forms of an environment's answer; text becomes a user message."""


@dataclass(frozen=True)
class Step:
    """The result of `step` if a pair (answer, done) is not enough."""

    observation: EnvironmentOutput
    done: bool
    """Whether the episode is over."""
    reward: float | None = None
    """The reward of this turn, or None if it has none."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Measurements of this turn, by name."""


@dataclass(frozen=True)
class Reply:
    """The policy's text of one turn, with the tool calls that were found in it."""

    text: str
    """The text as sampled."""
    message: Message
    """The reply as chat templates take it."""
    tool_calls: tuple[ToolCall, ...]
    """The calls that can be carried out."""
    problem: str | None
    """A description of the calls that cannot be carried out; None if there are none."""


class Environment(Protocol):
    """One episode's environment.

    It may have two further methods, plain or `async`:
    `get_reward()` gives the reward of the whole episode, or a list with a number for each sampled
    token; it is called once, at the end, however that comes.
    `close()` releases what the environment holds; it is called whatever happened.
    """

    def reset(self, row: Mapping[str, Any]) -> EnvironmentOutput | Awaitable[EnvironmentOutput]:
        """Begin an episode and return the first messages; `row` has the data row's columns."""
        ...

    def step(
        self, reply: Reply
    ) -> (
        tuple[EnvironmentOutput, bool]
        | Step
        | Awaitable[tuple[EnvironmentOutput, bool]]
        | Awaitable[Step]
    ):
        """Return the answer to a reply, and whether the episode is over.

        The answer is not shown to the policy if the episode is over.
        """
        ...
