"""Messages of the OpenAI chat interface, as chat templates take them, and back.

Source: the OpenAI API reference, "Create chat completion".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from plimsoll.data.pieces import Messages
from plimsoll.environment.protocol import Reply
from plimsoll.environment.schemas import shown
from plimsoll.errors import DataError

_ROLES = {"developer": "system"}
"""Names that other models have for a role of chat templates."""


def read_messages(given: object) -> Messages:
    """As chat templates take them: contents are text, and arguments of calls objects.

    Raises DataError, which names the message and its key, for what cannot be rendered.
    """
    if not isinstance(given, list) or not given:
        raise DataError(f"messages is {shown(given)}, and a list of at least one is needed.")
    return [_message(one, f"messages[{i}]") for i, one in enumerate(given)]


def _message(given: object, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise DataError(f"{where} is {shown(given)}, and needs a role.")
    role = given["role"]
    found: dict[str, Any] = {
        "role": _ROLES.get(role, role),
        "content": _text(given.get("content"), f"{where}.content"),
    }
    found |= {key: given[key] for key in ("name", "tool_call_id") if given.get(key)}
    if given.get("tool_calls"):
        calls = enumerate(given["tool_calls"])
        found["tool_calls"] = [_call(one, f"{where}.tool_calls[{i}]") for i, one in calls]
    return found


def _text(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content if isinstance(content, list) else [content]):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise DataError(f"{where}[{i}] is {shown(part)}, and only text can be read.")
        texts.append(part["text"])
    return "".join(texts)


def _call(given: object, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(function, Mapping):
        raise DataError(f"{where} is {shown(given)}, and needs a function.")
    arguments = function.get("arguments") or "{}"
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:  # as the policy wrote it: templates take text, too
        read = arguments
    call = {"name": function.get("name", ""), "arguments": read}
    return {"type": "function", "id": given.get("id", ""), "function": call}


def asked_tools(asked: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The tools that a call describes; none where it may call none. Raises DataError, as all of
    these do, for what cannot be read."""
    tools = asked.get("tools") or []
    if not isinstance(tools, list) or not all(
        isinstance(one, Mapping) and isinstance(one.get("function"), Mapping) for one in tools
    ):
        raise DataError(f"tools is {shown(tools)}, not a list of objects with a function.")
    return () if asked.get("tool_choice") == "none" else tuple(tools)


def asked_most(asked: Mapping[str, Any]) -> int | None:
    """The most tokens of an answer."""
    return asked_number(asked, "max_completion_tokens") or asked_number(asked, "max_tokens")


def asked_number(asked: Mapping[str, Any], name: str) -> int | None:
    """A whole number of 1 or more."""
    value = asked.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise DataError(f"{name} is {shown(value)}, and a whole number of 1 or more is needed.")
    return value


def asked_stop(asked: Mapping[str, Any]) -> tuple[str, ...]:
    """The strings that end an answer."""
    given = asked.get("stop") or ()
    stops = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(one, str) and one for one in stops):
        raise DataError(f"stop is {shown(given)}, and texts are needed.")
    return stops


def alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether they say the same. Ids of calls do not count, nor white space around a content, which
    clients trim."""
    return _said(one) == _said(other)


def _said(message: Mapping[str, Any]) -> tuple[object, ...]:
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return message["role"], (message.get("content") or "").strip(), message.get("name"), calls


def written_reply(reply: Reply) -> dict[str, Any]:
    """What the policy said as a client reads it."""
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
