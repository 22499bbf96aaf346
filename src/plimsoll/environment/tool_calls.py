"""Describe tools as JSON schemas, and read tool calls from a reply's text.

Chat templates describe the schemas, and calls are checked against them. No text of the policy
raises an error. If a call cannot be read, names no tool or has wrong arguments, the reply's
`problem` says what is wrong and what was expected.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match

from plimsoll.config.files import nearest
from plimsoll.config.json_text import nests_more
from plimsoll.data.pieces import tool_name
from plimsoll.environment.protocol import Message, Reply, ToolCall
from plimsoll.errors import ConfigError
from plimsoll.records import ExtractCalls, ExtractedCalls
from plimsoll.reward.outcome import safe_repr

Tool = Mapping[str, Any]
"""A function's JSON schema: `{"type": "function", "function": {"name", "description",
"parameters"}}`, or the inner mapping alone."""

MAX_CHARACTERS = 200
"""The most characters of a value in a message."""


def tools_by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Return tools by their names. Raises ConfigError if two have one name."""
    named: dict[str, Tool] = {}
    for tool in tools:
        name = tool_name(tool)
        if name in named:
            raise ConfigError(
                f"Two tools are called {name!r}, and a call could mean either: rename one."
            )
        named[name] = tool
    return named


def format_signature(tool: Tool) -> str:
    """Return a tool as one line: `name(argument: type, optional?: type)`."""
    parameters = _parameters(tool)
    required = parameters.get("required", ())
    arguments = [
        f"{name}{'' if name in required else '?'}: {_type_name(schema)}"
        for name, schema in parameters.get("properties", {}).items()
    ]
    return f"{tool_name(tool)}({', '.join(arguments)})"


def _type_name(schema: object) -> str:
    if not isinstance(schema, Mapping):
        return "anything"
    if "enum" in schema:
        return " or ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(map(_type_name, schema["anyOf"]))
    kinds = schema.get("type", "anything")
    name = kinds if isinstance(kinds, str) else " or ".join(kinds)
    inner = f" of {_type_name(schema['items'])}" if "items" in schema else ""
    return f"{name}{inner}{' or null' if schema.get('nullable') else ''}"


def check_tool(tool: Tool) -> None:
    """Raise ConfigError if calls cannot be checked against a tool's parameters."""
    try:
        Draft202012Validator.check_schema(_parameters(tool))
    except SchemaError as error:
        where = "/".join(map(str, error.absolute_path)) or "its top"
        raise ConfigError(
            f"The parameters of the tool {tool_name(tool)!r} are not a JSON schema: at {where}, "
            f"{_cut(error.message)}."
        ) from error


def wrong_arguments(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """Return a phrase on what is wrong with a call's arguments, or None if they fit the schema.

    An argument that the schema does not name is wrong, unless the schema has
    `additionalProperties`.
    """
    validator = _validator(json.dumps(_parameters(tool), sort_keys=True, default=str))
    error = best_match(validator.iter_errors(dict(arguments)))
    return None if error is None else _describe_error(error)


@functools.lru_cache(maxsize=1024)
def _validator(parameters: str) -> Draft202012Validator:
    schema: dict[str, Any] = json.loads(parameters)
    composed = {"allOf", "anyOf", "oneOf", "$ref"} & schema.keys()
    closed = {} if composed else {"additionalProperties": False}
    return Draft202012Validator(_with_null({"properties": {}, **closed, **schema}))


def _with_null(schema: Any) -> Any:
    """Return the schema with OpenAPI's `nullable`, which transformers writes, as `anyOf` null."""
    if isinstance(schema, list):
        return [_with_null(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _with_null(value) for key, value in schema.items()}
    if inner.get("nullable") is not True:  # of a parameter by this name it is a schema
        return inner
    return {"anyOf": [{k: v for k, v in inner.items() if k != "nullable"}, {"type": "null"}]}


def _parameters(tool: Tool) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = tool.get("function", tool).get("parameters", {})
    return parameters


def _describe_error(error: ValidationError) -> str:
    place = "".join(f"[{key!r}]" if at else str(key) for at, key in enumerate(error.absolute_path))
    return f"{f'{place}: ' if place else ''}{_cut(error.message)}"


def show_value(value: object) -> str:
    """Return the `repr` of a value, without its middle if it is long."""
    return _cut(safe_repr(value))


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2  # a validator's message begins with the value and ends with why
    return f"{text[:half]} ... {text[-half:]}"


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_EXPECTED = (
    f'Write {_OPEN}{{"name": "...", "arguments": {{...}}}}{_CLOSE}, with the name of a tool and an '
    f"object of its arguments."
)
_ONE_CALL = "a turn may have one."
_MAX_DEPTH = 64
_MAX_PROBLEMS = 3
_MOST_CALLS = 100
"""The most calls that are read in one reply: an error in JSON costs the text before it."""
_BLANKS = re.compile(r"\s*")


def read_reply(
    text: str, tools: Sequence[Tool], extract: ExtractCalls | None = None, *, one_call: bool = False
) -> Reply:
    """Return the reply with its tool calls. Calls inside `<think>` are ignored.

    Args:
        text: the sampled text, with the special tokens of its call format, without the end of turn.
        tools: the tools that the policy may call; if empty, no calls are searched for.
        extract: the function that finds the calls; default: `hermes`.
        one_call: whether the chat template takes only one call a turn; further calls are wrong.
    """
    if not tools:
        return Reply(text, Message("assistant", text), (), None)
    thought, rest = _split_thinking(text)
    content, extracted, unreadable = (extract or hermes)(rest, tools)
    known = tools_by_name(tools)
    checked = [_check_call(*call, known) for call in extracted[:_MOST_CALLS]]
    calls = tuple(call for call in checked if isinstance(call, ToolCall))
    problems = [*(wrong for wrong in checked if isinstance(wrong, str)), *unreadable]
    if len(extracted) > _MOST_CALLS:
        problems += [f"Only the first {_MOST_CALLS} calls were read."]
    if one_call and len(calls) > 1:
        problems += [f"Only the first call was carried out, of {calls[0].name!r}: {_ONE_CALL}"]
        calls = calls[:1]
    kept = (thought + content).rstrip() if calls else text
    return Reply(text, Message("assistant", kept, calls), calls, _join_problems(problems))


def _join_problems(problems: Sequence[str]) -> str | None:
    more = len(problems) - _MAX_PROBLEMS
    end = [f"And {more} more calls are wrong."] if more > 0 else []
    return " ".join([*problems[:_MAX_PROBLEMS], *end]) or None


def hermes(text: str, tools: Sequence[Tool]) -> ExtractedCalls:
    """Return the calls in a text, in the format of Hermes, Qwen 2.5 and Qwen 3.

    A call is `<tool_call>` and an object with `name` and `arguments`. The end tag may be missing,
    for example because it ends sampling.
    """
    begin, outside = 0, []
    calls: list[tuple[str, str, str]] = []
    problems: list[str] = []
    while (at := text.find(_OPEN, begin)) >= 0:
        if len(calls) + len(problems) == _MOST_CALLS:
            problems.append(f"Only the first {_MOST_CALLS} calls were read.")
            break
        outside.append(text[begin:at])
        call, begin = _hermes_call(text, at + len(_OPEN))
        if isinstance(call, str):
            problems.append(f"{call} {_EXPECTED}")
            outside.append(text[at:begin])
        else:
            calls.append((*call, ""))
    outside.append(text[begin:])
    return "".join(outside), calls, problems


def _hermes_call(text: str, begin: int) -> tuple[tuple[str, str] | str, int]:
    """Return the call, or a message on what is wrong with it; and the index after the call."""
    close = text.find(_CLOSE, begin)
    end = len(text) if close < 0 else close + len(_CLOSE)
    try:
        value, stop = _decode(text, begin)
    except (ValueError, RecursionError) as error:
        return f"A tool call is not valid JSON ({_reason(error)}): {_excerpt(text, begin)}.", end
    after = _skip_blanks(text, stop)
    closed = text.startswith(_CLOSE, after)
    if not closed and after < len(text):
        return (
            f"A tool call has more than one JSON object: {_excerpt(text, begin)}.",
            max(end, after),
        )
    end = after + len(_CLOSE) if closed else after
    if not isinstance(value, dict):
        return f"A tool call is no JSON object: {_excerpt(text, begin)}.", end
    for key, kind, name in (("name", str, "a string"), ("arguments", dict, "an object")):
        if key not in value:
            return f"A tool call has no {key!r}: {_excerpt(text, begin)}.", end
        if not isinstance(value[key], kind):
            return f"The {key!r} of a tool call is not {name}: {_excerpt(text, begin)}.", end
    return (value["name"], json.dumps(value["arguments"])), end


def _decode(text: str, begin: int) -> tuple[object, int]:
    """Return the JSON value that begins at `begin`, and the index after it.

    Raises ValueError if there is none or it nests too deeply, and RecursionError if it nests even
    more deeply.
    """
    value, end = json.JSONDecoder(parse_constant=_refuse).raw_decode(
        text, _skip_blanks(text, begin)
    )
    if nests_more(value, _MAX_DEPTH):
        raise ValueError(f"it nests more than {_MAX_DEPTH} deep")
    return value, end


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _skip_blanks(text: str, begin: int) -> int:
    blanks = _BLANKS.match(text, begin)
    return begin if blanks is None else blanks.end()


def _check_call(
    name: str, arguments: str, call_id: str, known: Mapping[str, Tool]
) -> ToolCall | str:
    """Return the call, or a message on what is wrong with it."""
    if name not in known:
        tools = ", ".join(map(format_signature, known.values()))
        return f"There is no tool {show_value(name)}.{nearest(name, known)} The tools: {tools}."
    expected = f"Expected: {format_signature(known[name])}."
    try:
        values, end = _decode(arguments, 0)
        if _skip_blanks(arguments, end) < len(arguments):
            raise ValueError("more follows its end")
    except (ValueError, RecursionError) as error:
        problem = f"The arguments of the call of {name!r} are not valid JSON ({_reason(error)})"
        return f"{problem}: {_excerpt(arguments, 0)}. {expected}"
    if not isinstance(values, dict):
        return (
            f"The arguments of the call of {name!r} are no object: {show_value(values)}. {expected}"
        )
    wrong = wrong_arguments(known[name], values)
    if wrong is not None:
        return f"The arguments of the call of {name!r} are wrong: {wrong}. {expected}"
    return ToolCall(name, values, call_id)


def _split_thinking(text: str) -> tuple[str, str]:
    """Return the thought, with its tags, and the rest of the text.

    The rest is empty if the thought has no end. The `<think>` may stand in the prompt instead.
    """
    thought, over, rest = text.partition("</think>")
    if over:
        return thought + over, rest
    return (text, "") if text.lstrip().startswith("<think>") else ("", text)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "it nests too deeply" if isinstance(error, RecursionError) else str(error)


def _excerpt(text: str, begin: int) -> str:
    """Return the beginning of a call, on one line."""
    return show_value(" ".join(text[begin : begin + 500].partition(_CLOSE)[0].split()))


def figures_of(reply: Reply, failed: int = 0) -> dict[str, float]:
    """Return the figures of a turn with tools; `failed` of its calls raised."""
    return {
        "tool_calls": float(len(reply.tool_calls)),
        "tool_calls_failed": float(failed),
        "tool_calls_malformed": float(reply.problem is not None),
    }
