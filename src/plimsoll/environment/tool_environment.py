"""Environments whose public methods are the policy's tools: the shape of TRL's
`environment_factory`, as it is. And plain functions as tools.

    class Counter:
        def reset(self, target, **kwargs):   # the row's columns; gives text, or None
            self.count, self.target = 0, target
        def increment(self, by: int) -> int:
            '''Increment the counter.

            Args:
                by: What to add to it.
            '''
            self.count += by
            return self.count
        def get_reward(self):                # may be left out, as in any environment
            return float(self.count == self.target)

The episode is over when the policy calls no tool. `reset`, `get_reward` and `close` are no tools.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.environment.protocol import Message, Observation, Reply, Step, ToolCall, settled
from plimsoll.environment.schemas import Tool, by_name, check_tool, shown
from plimsoll.environment.tool_calls import figures_of
from plimsoll.errors import ConfigError

RESERVED = ("reset", "get_reward", "close")
MOST_CHARACTERS = 20_000
"""Of a tool's result; the rest is cut off, and the result says so."""

Function = Callable[..., Any]


@dataclass(frozen=True)
class Toolbox:
    """Functions that a policy may call, plain or `async`, by their names; and their schemas."""

    functions: Mapping[str, Function]
    schemas: tuple[Tool, ...]

    @property
    def awaited(self) -> bool:
        """Whether one of them is an `async def`."""
        return any(map(inspect.iscoroutinefunction, self.functions.values()))


def methods_of(environment: object) -> list[Function]:
    """The methods that the policy may call: all public ones but `RESERVED`."""
    return [getattr(environment, name) for name in _tools_of(type(environment))]


def functions_of(kind: type) -> list[Function]:
    """The same of a class."""
    return [*_tools_of(kind).values()]


def _tools_of(kind: type) -> dict[str, Function]:
    """By name; of the class, as an object's properties may do anything."""
    members = inspect.getmembers(kind, inspect.isfunction)
    return {name: own for name, own in members if name[0] != "_" and name not in RESERVED}


def toolbox(functions: Iterable[Function]) -> Toolbox:
    """Schemas are made of signatures and docstrings (Google's style), as transformers does.

    Raises ConfigError for a function without a docstring, for an argument without a type or a
    description, and where two have one name.
    """
    functions = list(functions)
    schemas = tuple(map(schema_of, functions))
    by_name(schemas)
    return Toolbox({own.__name__: own for own in functions}, schemas)


def schema_of(function: Function) -> Tool:
    """What the policy is told of a function."""
    from transformers.utils import chat_template_utils  # takes seconds, and may import torch

    try:
        schema: Tool = chat_template_utils.get_json_schema(function)
    except (
        chat_template_utils.DocstringParsingException,
        chat_template_utils.TypeHintParsingException,
        AttributeError,
        NameError,
        TypeError,
        ValueError,
    ) as error:
        name = getattr(function, "__qualname__", shown(function))
        raise ConfigError(
            f"{name} cannot be a tool: {error} A tool needs a docstring with a line on what it "
            f"does and, under `Args:`, one on each argument, and each argument a type. What is no "
            f"tool begins with an underscore."
        ) from error
    check_tool(schema)
    return schema


class ToolEnvironment:
    """An environment (`protocol.Environment`) of an object with tools as methods, and of functions
    beside them. inner: the object, for rewards that read its state.

    A tool that raises is answered with the error, and counted. `get_reward` and `close` are the
    object's, where it has them.
    """

    get_reward: Function
    close: Function

    def __init__(self, inner: Any, tools: Toolbox) -> None:
        self.inner, self._tools = inner, tools
        _lend(self, inner)

    def reset(self, row: Mapping[str, Any]) -> Observation:
        """What the object's `reset` says, and its tools."""
        reset = self.inner.reset
        return _begun(reset(**_wanted(reset, row)), self._tools)

    def step(self, reply: Reply) -> Step:
        """Carry the calls out, in their order."""
        return _step(reply, [self._answer(call) for call in reply.tool_calls])

    def _answer(self, call: ToolCall) -> _Answer:
        try:
            found = self._tools.functions[call.name](**call.arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a tool may do anything
            return _failed(call.name, error)
        return _Answer(call.name, result_text(found, call.name))


class AsyncToolEnvironment:
    """The same where one of the tools, or `reset`, is an `async def`. Plain ones are called in the
    event loop, too: they should not take long."""

    get_reward: Function
    close: Function

    def __init__(self, inner: Any, tools: Toolbox) -> None:
        self.inner, self._tools = inner, tools
        _lend(self, inner)

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """What the object's `reset` says, and its tools."""
        reset = self.inner.reset
        return _begun(await settled(reset(**_wanted(reset, row))), self._tools)

    async def step(self, reply: Reply) -> Step:
        """Carry the calls out, in their order."""
        return _step(reply, [await self._answer(call) for call in reply.tool_calls])

    async def _answer(self, call: ToolCall) -> _Answer:
        try:
            found = await settled(self._tools.functions[call.name](**call.arguments))
        except (Exception, SystemExit) as error:  # noqa: BLE001  a tool may do anything
            return _failed(call.name, error)
        return _Answer(call.name, result_text(found, call.name))


def tool_environment(
    inner: Any, functions: Sequence[Function] = ()
) -> ToolEnvironment | AsyncToolEnvironment:
    """Of an object with `reset`: of its methods, and of functions beside them. Raises ConfigError
    as `toolbox` does, and where there is no tool at all."""
    tools = toolbox([*functions, *methods_of(inner)])
    if not tools.functions:
        raise no_tool(type(inner))
    if tools.awaited or inspect.iscoroutinefunction(inner.reset):
        return AsyncToolEnvironment(inner, tools)
    return ToolEnvironment(inner, tools)


def no_tool(kind: type) -> ConfigError:
    """Of a class that leaves a policy nothing to call."""
    return ConfigError(
        f"{kind.__name__} has no tool: its public methods, other than {', '.join(RESERVED)}, are "
        f"what the policy may call, with the functions of `tools`; or it needs a method `step`."
    )


@dataclass(frozen=True)
class _Answer:
    name: str
    text: str
    failed: bool = False


def _lend(environment: ToolEnvironment | AsyncToolEnvironment, inner: object) -> None:
    """Who asks for a method that may be left out finds it only where the object has it."""
    if callable(found := getattr(inner, "get_reward", None)):
        environment.get_reward = found
    if callable(found := getattr(inner, "close", None)):
        environment.close = found


def _wanted(reset: Function, row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that `reset` takes."""
    parameters = inspect.signature(reset).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(row)
    return {p.name: row[p.name] for p in parameters if p.name in row}


def _begun(said: object, tools: Toolbox) -> Observation:
    text = "" if said is None else said if isinstance(said, str) else _blocks(said, "reset")
    if text is None:
        raise ConfigError(
            f"reset gave {shown(said)} ({type(said).__name__}), not text or None to begin with."
        )
    return Observation((Message("user", text),) if text else (), tools.schemas)


def _step(reply: Reply, answers: Sequence[_Answer]) -> Step:
    messages = [Message("tool", answer.text, name=answer.name) for answer in answers]
    if reply.problem is not None:
        messages = _with_problem(messages, reply.problem)
    figures = figures_of(reply, sum(answer.failed for answer in answers))
    return Step(Observation(tuple(messages)), not messages, figures=figures)


def _with_problem(messages: list[Message], problem: str) -> list[Message]:
    """A user's message where no call was carried out, for templates refuse a tool's then; else
    under the last result, for they want as many results as calls."""
    if not messages:
        return [Message("user", problem)]
    *before, last = messages
    return [*before, Message(last.role, f"{last.content}\n{problem}", name=last.name)]


def _failed(name: str, error: BaseException) -> _Answer:
    text = str(error) or type(error).__name__
    return _Answer(name, _bounded(f"Error: {text}"), failed=True)


def result_text(value: object, name: str) -> str:
    """What a tool gave, as the policy reads it: text as it is, all else as JSON where it can be,
    or as Python prints it; no more than `MOST_CHARACTERS`.

    Raises ConfigError for an image, and for what would have to be awaited.
    """
    if inspect.isawaitable(value):
        raise ConfigError(f"{name} gave something to await: write it as an `async def`.")
    if isinstance(value, str):
        return _bounded(value)
    blocks = _blocks(value, name)
    if blocks is not None:
        return _bounded(blocks)
    try:
        return _bounded(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return _bounded(str(value))


def _blocks(value: object, name: str) -> str | None:
    """The text of a list of content blocks; None: it is something else."""
    if not isinstance(value, list) or not value:
        return None
    if not all(isinstance(one, Mapping) and isinstance(one.get("type"), str) for one in value):
        return None
    kinds = {one["type"] for one in value}
    if "image" in kinds:
        raise ConfigError(f"{name} gave an image, and only text can be shown to the policy.")
    if kinds != {"text"}:
        return None
    return "".join(str(one.get("text", "")) for one in value)


def _bounded(text: str) -> str:
    """Without halves of surrogate pairs, which no tokenizer takes."""
    whole = len(text)
    kept = text[:MOST_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    if whole <= MOST_CHARACTERS:
        return kept
    return f"{kept}\n(the first {MOST_CHARACTERS:,} of {whole:,} characters)"
