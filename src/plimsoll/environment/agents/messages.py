"""Translate between messages of the OpenAI API and messages for chat templates.

Source: the OpenAI API reference, "Create chat completion".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from plimsoll.data.pieces import TOOL_ROLES, Messages, answer_text, call_arguments
from plimsoll.environment.protocol import Reply
from plimsoll.errors import DataError
from plimsoll.reward.outcome import short_repr


def read_messages(given: object) -> Messages:
    """Return a request's messages in the form that chat templates take.

    Every content becomes text, and the arguments of calls become objects.
    Raises DataError, which names the message and its key, for a message that is not valid.
    """
    if not isinstance(given, list) or not given:
        raise DataError(f"messages is {short_repr(given)}, and a list of at least one is needed.")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(given)]


def _read_message(given: object, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise DataError(f"{where} is {short_repr(given)}, and needs a role.")
    role, content = given["role"], given.get("content")
    content = answer_text(content) if role in TOOL_ROLES else content
    message: dict[str, Any] = {"role": role, "content": _read_text(content, f"{where}.content")}
    for key in ("name", "tool_call_id"):
        if given.get(key):
            message[key] = _read_name(given[key], f"{where}.{key}")
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list):
        raise DataError(f"{where}.tool_calls is {short_repr(calls)}, and a list is needed.")
    if calls:
        places = enumerate(calls)
        message["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{i}]") for i, call in places]
    return message


def _read_name(given: object, where: str) -> str:
    if not isinstance(given, str):
        raise DataError(f"{where} is {short_repr(given)}, and text is needed.")
    return given


def _read_text(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content if isinstance(content, list) else [content]):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise DataError(f"{where}[{i}] is {short_repr(part)}, and only text can be read.")
        texts.append(part["text"])
    return "".join(texts)


def _read_call(given: object, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(function, Mapping):
        raise DataError(f"{where} is {short_repr(given)}, and needs a function.")
    values = function.get("arguments")
    with suppress(ValueError):  # else as the policy wrote it: templates take text, too
        values = call_arguments(values)
    name = _read_name(function.get("name", ""), f"{where}.function.name")
    call_id = _read_name(given.get("id") or "", f"{where}.id")
    call = {"name": name, "arguments": values}
    return {"type": "function", "id": call_id, "function": call}


def read_tools(request: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of a request's tools; empty if `tool_choice` is "none".

    Raises DataError, like the other readers below, if the field is not valid.
    """
    tools = request.get("tools") or []
    if not isinstance(tools, list) or not all(
        isinstance(tool, Mapping)
        and isinstance(tool.get("function"), Mapping)
        and isinstance(tool["function"].get("name"), str)
        for tool in tools
    ):
        raise DataError(
            f"tools is {short_repr(tools)}, not a list of objects with a function and its name."
        )
    return () if request.get("tool_choice") == "none" else tuple(tools)


def read_max_tokens(request: Mapping[str, Any]) -> int | None:
    """Return the request's limit of new tokens, or None if it sets no limit."""
    return read_count(request, "max_completion_tokens") or read_count(request, "max_tokens")


def read_count(request: Mapping[str, Any], name: str) -> int | None:
    """Return the field `name`, a whole number of 1 or more; None if the request lacks it."""
    value = request.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise DataError(
            f"{name} is {short_repr(value)}, and a whole number of 1 or more is needed."
        )
    return value


def read_stop(request: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the request's stop strings; empty if it has none."""
    given = request.get("stop") or ()
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) and s for s in stops):
        raise DataError(f"stop is {short_repr(given)}, and texts are needed.")
    return tuple(stops)


def say_the_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two messages have the same role, name, content and tool calls.

    Ids of calls are not compared. White space around the content is ignored: clients trim it.
    """
    return _essence(first) == _essence(second)


def _essence(message: Mapping[str, Any]) -> tuple[object, ...]:
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return message["role"], (message.get("content") or "").strip(), message.get("name"), calls


def reply_to_wire(reply: Reply) -> dict[str, Any]:
    """Return the policy's reply as an assistant message of the OpenAI API."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.message.content}
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in reply.tool_calls
    ]
    return message | {"tool_calls": calls} if calls else message
