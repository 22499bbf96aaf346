"""Calls of one environment, and what comes of them in our own terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plimsoll.data.pieces import Tools
from plimsoll.environment.protocol import Message, Observation, Step
from plimsoll.reward import outcome
from plimsoll.reward.outcome import Failed, finite, short_repr

Rewarded = float | tuple[float, ...] | None
"""Of an episode; or of each sampled token; None: the environment gives none of the whole."""


@dataclass(frozen=True)
class Begun:
    """What `reset` came to. tools: that the policy may call."""

    messages: tuple[Message, ...]
    tools: Tools = ()


@dataclass(frozen=True)
class Answer:
    """What `step` came to."""

    messages: tuple[Message, ...]
    done: bool
    reward: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)


class EnvironmentFailed(Exception):
    """An episode cannot go on. failed: what came of a call, going on after the environment's
    name."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.said)
        self.failed = failed


def raised(error: BaseException) -> Failed:
    """Of an environment's method that raised."""
    found = outcome.error_outcome(error)
    return found if isinstance(found, Failed) else Failed(found.said, kind=found.kind)


def begun(said: Any) -> Begun | Failed:
    """What `reset` gave."""
    messages = _messages(said, "reset")
    if isinstance(messages, Failed):
        return messages
    return Begun(messages, said.tools if isinstance(said, Observation) else ())


def stepped(given: Any) -> Answer | Failed:
    """What `step` gave: a `Step`, or (what it says, whether the episode is over)."""
    if isinstance(given, Step):
        said, done, figures = given.observation, given.done, given.figures
        reward = 0.0 if given.reward is None else given.reward
    elif isinstance(given, tuple) and len(given) == 2:
        (said, done), reward, figures = given, 0.0, {}
    else:
        return _wrong("step", given, "a pair (what it says, whether the episode is over) or a Step")
    if not isinstance(done, bool | int) or done not in (0, 1):
        return _wrong("step", done, "true or false beside what it says")
    numbers = {"its reward": reward, **{f"its figure {k}": v for k, v in dict(figures).items()}}
    for name, value in numbers.items():
        if finite(value) is None:
            return _wrong("step", value, f"a finite number as {name}")
    messages = _messages(said, "step")
    if isinstance(messages, Failed):
        return messages
    if not done and not messages:
        return _wrong("step", said, "something to say while the episode goes on")
    return Answer(messages, bool(done), float(reward), {k: float(v) for k, v in figures.items()})


def rewarded(given: Any, method: str = "get_reward") -> Rewarded | Failed:
    """What `get_reward`, or an agent, gave: a number, or a list with one for each sampled token."""
    if given is None:
        return None
    one = finite(given)
    if one is not None:
        return one
    values = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        found = [finite(value) for value in values]
        if all(value is not None for value in found):
            return tuple(value for value in found if value is not None)
    return _wrong(method, given, "a finite number, or a list of one for each sampled token")


def _messages(said: Any, method: str) -> tuple[Message, ...] | Failed:
    if said is None or (isinstance(said, str) and not said):
        return ()
    if isinstance(said, str):
        return (Message("user", said),)
    if isinstance(said, Message):
        return (said,)
    if isinstance(said, Observation):
        return _messages(said.messages, method)
    if not isinstance(said, Sequence) or isinstance(said, bytes):
        return _wrong(method, said, "text, messages or None to say")
    found = [_message(one) for one in said]
    if any(one is None for one in found):
        return _wrong(method, said, "messages with role and content")
    return tuple(one for one in found if one is not None)


def _message(one: object) -> Message | None:
    if isinstance(one, Message):
        return one if isinstance(one.content, str) else None
    if not isinstance(one, Mapping):
        return None
    texts = [one.get("role"), one.get("content"), one.get("name", ""), one.get("tool_call_id", "")]
    if not all(isinstance(text, str) for text in texts):
        return None
    role, content, name, call_id = map(str, texts)
    return Message(role, content, name=name, call_id=call_id)


def _wrong(method: str, given: object, wanted: str) -> Failed:
    return Failed(f"'s {method} gave {short_repr(given)} ({type(given).__name__}), not {wanted}")


def method_of(environment: object, name: str) -> Callable[..., Any] | None:
    """A method that may be left out."""
    found = getattr(environment, name, None)
    return found if callable(found) else None
