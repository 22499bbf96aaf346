"""What an environment is: it begins an episode and answers the policy's replies until it is done.

    class Echo:
        def reset(self, row):            # the beginning: text, messages, or an Observation
            self.wanted = row["reference"]
            return "Say it."
        def step(self, reply):           # (the answer, whether the episode is over)
            return "Try again.", reply.text.strip() == self.wanted
        def get_reward(self):            # once the episode is over; may be left out
            return 1.0
        def close(self): ...             # may be left out

Each method may be plain or `async`. What `reset` gives follows the row's own messages.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


async def await_if_needed(given: Any) -> Any:
    """Return what a method gave, which may be plain or `async`."""
    return await given if inspect.isawaitable(given) else given


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    """The tool's name."""
    arguments: Mapping[str, Any]
    """The arguments by name."""
    id: str = ""
    """Nine letters and digits that no other call of the episode has; the policy's own if it wrote
    one."""


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
    """What `reset` and `step` give the policy."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """What the policy may call, as chat templates take it."""


EnvironmentOutput = str | Message | list[Message] | Observation
"""What an environment may give the policy; text is a user's message."""


@dataclass(frozen=True)
class Step:
    """What `step` may give where a pair says too little."""

    observation: EnvironmentOutput
    done: bool
    """Whether the episode is over."""
    reward: float | None = None
    """The reward of this turn; None: it has none."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What was measured in this turn, by name."""


@dataclass(frozen=True)
class Reply:
    """What the policy wrote in a turn."""

    text: str
    """The text as sampled."""
    message: Message
    """The reply as chat templates take it."""
    tool_calls: tuple[ToolCall, ...]
    """The calls that can be carried out."""
    problem: str | None
    """What is wrong with other calls; None: nothing."""


class Environment(Protocol):
    """One episode's environment.

    It may have two further methods, plain or `async`, too:
    `get_reward()` gives the reward of the whole episode, or a list with a number for each sampled
    token; it is called once, at the end, however that comes.
    `close()` releases what the environment holds; it is called whatever happened.
    """

    def reset(self, row: Mapping[str, Any]) -> EnvironmentOutput | Awaitable[EnvironmentOutput]:
        """Begin an episode about `row`, the columns of the data's row."""
        ...

    def step(
        self, reply: Reply
    ) -> (
        tuple[EnvironmentOutput, bool]
        | Step
        | Awaitable[tuple[EnvironmentOutput, bool]]
        | Awaitable[Step]
    ):
        """Answer a reply. What stands beside a true `done` is not shown to the policy."""
        ...
