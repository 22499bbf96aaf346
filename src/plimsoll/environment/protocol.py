"""What an environment is: it begins an episode and answers what the policy says, until it is done.

    class Echo:
        def reset(self, row):            # the beginning: text, messages, or an Observation
            self.wanted = row["reference"]
            return "Say it."
        def step(self, reply):           # (what it says next, whether the episode is over)
            return "Try again.", reply.text.strip() == self.wanted
        def get_reward(self):            # once the episode is over; may be left out
            return 1.0
        def close(self): ...             # may be left out

Each of them may be plain or `async`. What `reset` says follows the row's own messages.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


async def settled(given: Any) -> Any:
    """What a method gave that may be plain or `async`."""
    return await given if inspect.isawaitable(given) else given


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote: a tool's name, and its arguments by name. id: of nine letters
    and digits, no other call of the episode has it; the policy's own where it wrote one."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Message:
    """What one side says. role: `system`, `user`, `assistant` or `tool`; or `raw`: the text goes on
    as it is, without the chat template. name: of the tool that says it. call_id: of the call that
    it answers; results without one answer the calls in their order."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    call_id: str = ""


@dataclass(frozen=True)
class Observation:
    """What `reset` and `step` say. tools: what the policy may call, as chat templates take them."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


Said = str | Message | list[Message] | Observation
"""What an environment may say; text is a user's message."""


@dataclass(frozen=True)
class Step:
    """What `step` may give where a pair says too little. reward: of this turn; None: none.
    figures: measured in this turn, by name."""

    observation: Said
    done: bool
    reward: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What the policy said. text: as sampled. message: as chat templates take it. tool_calls: those
    that may be carried out. problem: what is wrong with the others; None: nothing."""

    text: str
    message: Message
    tool_calls: tuple[ToolCall, ...]
    problem: str | None


class Environment(Protocol):
    """One episode's environment. It may have two methods more, plain or `async`, too:

    `get_reward()` gives the reward of the whole episode, or a list with a number for each sampled
    token; it is called once, at the end, however that comes.
    `close()` lets go of what it holds; it is called whatever happened.
    """

    def reset(self, row: Mapping[str, Any]) -> Said | Awaitable[Said]:
        """Begin. row: the columns of the data's row."""
        ...

    def step(
        self, reply: Reply
    ) -> tuple[Said, bool] | Step | Awaitable[tuple[Said, bool]] | Awaitable[Step]:
        """Answer. What is said beside `done` is not shown to the policy."""
        ...
