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
What a method returns is read as a result or as a failure.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from plimsoll.reward.outcome import Failed, error_outcome, finite, short_repr


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


EpisodeReward = float | tuple[float, ...] | None
"""The reward of an episode, or a reward for each sampled token, or None if there is no reward."""


@dataclass(frozen=True)
class StepResult:
    """The parsed result of `step`."""

    messages: tuple[Message, ...]
    done: bool
    reward: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)


class EnvironmentFailed(Exception):
    """Raised if an episode cannot go on. The text of `failed` follows the environment's name."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.said)
        self.failed = failed


def failure_of(error: BaseException) -> Failed:
    """Return the `Failed` that describes an error of an environment's or agent's code."""
    return error.failed if isinstance(error, EnvironmentFailed) else error_outcome(error)


def read_reset(given: Any) -> Observation | Failed:
    """Return the observation that `reset` gave, or a `Failed` if it gave something else."""
    messages = _read_messages(given, "reset")
    if isinstance(messages, Failed):
        return messages
    return Observation(messages, given.tools if isinstance(given, Observation) else ())


def read_step(given: Any) -> StepResult | Failed:
    """Return the result of `step`, or a `Failed` if it gave something else.

    `step` may give a `Step`, or a pair (the answer, whether the episode is over).
    """
    if isinstance(given, Step):
        output, done, figures = given.observation, given.done, given.figures
        reward = 0.0 if given.reward is None else given.reward
    elif isinstance(given, tuple) and len(given) == 2:
        (output, done), reward, figures = given, 0.0, {}
    else:
        return _wrong("step", given, "a pair (what it says, whether the episode is over) or a Step")
    if not isinstance(done, bool | int) or done not in (0, 1):
        return _wrong("step", done, "true or false beside what it says")
    numbers = {"its reward": reward, **{f"its figure {k}": v for k, v in dict(figures).items()}}
    for name, value in numbers.items():
        if finite(value) is None:
            return _wrong("step", value, f"a finite number as {name}")
    messages = _read_messages(output, "step")
    if isinstance(messages, Failed):
        return messages
    if not done and not messages:
        return _wrong("step", output, "something to say while the episode goes on")
    numbers = {name: float(value) for name, value in figures.items()}
    return StepResult(messages, bool(done), float(reward), numbers)


def read_reward(given: Any, method: str = "get_reward") -> EpisodeReward | Failed:
    """Return the reward that `get_reward` or an agent gave, or a `Failed`.

    It may give a finite number, a list of one number for each sampled token, or None.
    """
    if given is None:
        return None
    number = finite(given)
    if number is not None:
        return number
    values = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        numbers = tuple(number for value in values if (number := finite(value)) is not None)
        if len(numbers) == len(values):
            return numbers
    return _wrong(method, given, "a finite number, or a list of one for each sampled token")


def _read_messages(output: Any, method: str) -> tuple[Message, ...] | Failed:
    if output is None or (isinstance(output, str) and not output):
        return ()
    if isinstance(output, str):
        return (Message("user", output),)
    if isinstance(output, Message):
        return (output,)
    if isinstance(output, Observation):
        return _read_messages(output.messages, method)
    if not isinstance(output, Sequence) or isinstance(output, bytes):
        return _wrong(method, output, "text, messages or None to say")
    messages = tuple(message for item in output if (message := _read_message(item)) is not None)
    if len(messages) < len(output):
        return _wrong(method, output, "messages with role and content")
    return messages


def _read_message(item: object) -> Message | None:
    if isinstance(item, Message):
        return item if isinstance(item.content, str) else None
    if not isinstance(item, Mapping):
        return None
    texts = (
        *map(item.get, ("role", "content")),
        item.get("name", ""),
        item.get("tool_call_id", ""),
    )
    if not all(isinstance(text, str) for text in texts):
        return None
    role, content, name, call_id = map(str, texts)
    return Message(role, content, name=name, call_id=call_id)


def _wrong(method: str, given: object, wanted: str) -> Failed:
    return Failed(f"'s {method} gave {short_repr(given)} ({type(given).__name__}), not {wanted}")


def method_of(environment: object, name: str) -> Callable[..., Any] | None:
    """Return the environment's method of a name, or None if it has no such method."""
    method = getattr(environment, name, None)
    return method if callable(method) else None


READ: Mapping[str, Callable[[Any], object]] = {
    "reset": read_reset,
    "step": read_step,
    "get_reward": read_reward,
    "close": lambda given: None,
}
"""The function that parses each method's return value."""
