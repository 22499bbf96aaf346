"""Environments whose public methods, or plain functions, are the policy's tools.

TRL's `environment_factory` has this shape.

    class Counter:
        def reset(self, target, **kwargs):   # the row's columns; gives text, or None
            self.count, self.target = 0, target
        def increment(self, by: int) -> int: # with a docstring that describes it and `by`
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
from functools import partial
from typing import Any

from plimsoll.environment.protocol import (
    Message,
    Observation,
    Reply,
    Step,
    ToolCall,
    await_if_needed,
)
from plimsoll.environment.tool_calls import Tool, check_tool, figures_of, tools_by_name
from plimsoll.errors import ConfigError
from plimsoll.process.threads import in_thread
from plimsoll.reward.outcome import short_repr

RESERVED = ("reset", "get_reward", "close")
MAX_CHARACTERS = 20_000
"""The most characters of a tool's result; a longer result is cut and says so."""

ToolFunction = Callable[..., Any]


@dataclass(frozen=True)
class Toolbox:
    """Functions that a policy may call, with their schemas."""

    functions: Mapping[str, ToolFunction]
    """The functions, plain or `async`, by their names."""
    schemas: tuple[Tool, ...]


def toolbox_of(owner: object, functions: Sequence[ToolFunction]) -> Toolbox:
    """Return a toolbox of `functions` and of the methods of a class or object.

    The methods are the public ones except `RESERVED`. Raises ConfigError as `toolbox` does, and if
    there is no tool at all.
    """
    kind = owner if inspect.isclass(owner) else type(owner)
    # The names come from the class, as an object's properties may do anything.
    names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    methods = [getattr(owner, name) for name in names if name[0] != "_" and name not in RESERVED]
    tools = toolbox([*functions, *methods])
    if not tools.functions:
        raise ConfigError(
            f"{kind.__name__} has no tool: its public methods, other than {', '.join(RESERVED)}, "
            f"are what the policy may call, with the functions of `tools`; or it needs a method "
            f"`step`."
        )
    return tools


def toolbox(functions: Iterable[ToolFunction]) -> Toolbox:
    """Return a toolbox of functions with their schemas.

    transformers makes the schemas from signatures and docstrings (Google's style). Raises
    ConfigError for a function without a docstring, for an argument without a type or a description,
    and if two functions have the same name.
    """
    functions = list(functions)
    schemas = tuple(map(schema_of, functions))
    tools_by_name(schemas)
    return Toolbox({function.__name__: function for function in functions}, schemas)


def schema_of(function: ToolFunction) -> Tool:
    """Return the JSON schema of a function. Raises ConfigError as `toolbox` does."""
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
        name = getattr(function, "__qualname__", short_repr(function))
        raise ConfigError(
            f"{name} cannot be a tool: {error} A tool needs a docstring with a line on what it "
            f"does and, under `Args:`, one on each argument, and each argument a type. A method "
            f"that is not a tool begins with an underscore."
        ) from error
    check_tool(schema)
    return schema


class ToolEnvironment:
    """An environment whose tools are the methods of an object, and functions.

    Plain methods and functions are called in threads, `async` ones in the event loop. If a tool
    raises, the policy gets the error as the result, and the failure is counted. `get_reward` and
    `close` are the object's, if it has them.
    """

    get_reward: ToolFunction
    close: ToolFunction

    def __init__(self, inner: Any, functions: Sequence[ToolFunction] = ()) -> None:
        """Wrap an object; rewards may read its state. Raises ConfigError as `toolbox_of` does."""
        self.inner, self._tools = inner, toolbox_of(inner, functions)
        for name in ("get_reward", "close"):
            if callable(method := getattr(inner, name, None)):
                setattr(self, name, method)

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Call the object's `reset`; return its text as a user message, and the tools."""
        reset = self.inner.reset
        given = await await_if_needed(await _call(reset, _wanted_columns(reset, row)))
        text = given or "" if isinstance(given, str | None) else _block_text(given, "reset")
        if text is None:
            raise ConfigError(
                f"reset gave {short_repr(given)} ({type(given).__name__}), not text or "
                "None to begin with."
            )
        return Observation((Message("user", text),) if text else (), self._tools.schemas)

    async def step(self, reply: Reply) -> Step:
        """Carry out the reply's calls in order; return their results.

        The episode is over if there is nothing to answer.
        """
        results = [await self._carry_out(call) for call in reply.tool_calls]
        messages = [Message("tool", text, name=name) for name, text, _ in results]
        if reply.problem is not None:
            messages = _with_problem(messages, reply.problem)
        figures = figures_of(reply, sum(failed for _, _, failed in results))
        return Step(Observation(tuple(messages)), not messages, figures=figures)

    async def _carry_out(self, call: ToolCall) -> tuple[str, str, bool]:
        """Return the tool's name, its result as text, and whether it raised."""
        try:
            value = await _call(self._tools.functions[call.name], call.arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a tool may do anything
            return call.name, _limit(f"Error: {str(error) or type(error).__name__}"), True
        return call.name, result_text(value, call.name), False


async def _call(function: ToolFunction, arguments: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await in_thread(partial(function, **arguments))


def _wanted_columns(reset: ToolFunction, row: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(reset).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(row)
    return {p.name: row[p.name] for p in parameters if p.name in row}


def _with_problem(messages: list[Message], problem: str) -> list[Message]:
    """Return the messages with the problem of the calls that could not be carried out.

    Without results the problem is a user message, as templates refuse a tool's message then. With
    results it is appended to the last one, as templates want exactly one result for each call.
    """
    if not messages:
        return [Message("user", problem)]
    *before, last = messages
    return [*before, Message(last.role, f"{last.content}\n{problem}", name=last.name)]


def result_text(value: object, name: str) -> str:
    """Return a tool's result as text for the policy, cut to `MAX_CHARACTERS`.

    Text stays as it is. Other values become JSON, or `str(value)` if JSON cannot hold them. Raises
    ConfigError for an image, and for an awaitable.
    """
    if inspect.isawaitable(value):
        raise ConfigError(f"{name} gave something to await: write it as an `async def`.")
    if isinstance(value, str):
        return _limit(value)
    text = _block_text(value, name)
    if text is not None:
        return _limit(text)
    try:
        return _limit(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return _limit(str(value))


def _block_text(value: object, name: str) -> str | None:
    """Return the text of a list of content blocks; None if the value is something else."""
    if not isinstance(value, list) or not value:
        return None
    if not all(
        isinstance(block, Mapping) and isinstance(block.get("type"), str) for block in value
    ):
        return None
    kinds = {block["type"] for block in value}
    if "image" in kinds:
        raise ConfigError(f"{name} gave an image, and only text can be shown to the policy.")
    if kinds != {"text"}:
        return None
    return "".join(str(block.get("text", "")) for block in value)


def _limit(text: str) -> str:
    """Return the text, cut if too long; "?" replaces lone surrogates, which tokenizers refuse."""
    kept = text[:MAX_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    if len(text) <= MAX_CHARACTERS:
        return kept
    return f"{kept}\n(the first {MAX_CHARACTERS:,} of {len(text):,} characters)"
