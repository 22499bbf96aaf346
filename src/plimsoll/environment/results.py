"""Parse the return values of environments' methods into results or failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plimsoll.environment.protocol import Message, Observation, Step
from plimsoll.reward.outcome import Failed, error_outcome, finite, short_repr

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
    if isinstance(error, EnvironmentFailed):
        return error.failed
    given = error_outcome(error)
    return given if isinstance(given, Failed) else Failed(given.said, kind=given.kind)


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
