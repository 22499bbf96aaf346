"""Read a column's turns as messages, in OpenAI's form, ShareGPT's and variants of libraries.

A message has `role`, `content` as text, and the other keys of its turn, for the template. Two
things always get the same form, whatever the row writes:
- tool calls are `tool_calls`, and their arguments objects. OpenAI's older key `function_call`
  becomes one, as do the turns `function_call` and `tool_call` of LLaMA-Factory and ms-swift, which
  hold a call as JSON.
- a turn that its row marks as not to be learned (`MARKS`) has `train: False`. Other turns lack the
  key.

Turns of users and assistants must have text. An empty system message is none, and what a tool
answers may be empty or any value of JSON.

Every check raises `RowProblem` with the column's name as the config writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from plimsoll.config.files import nearest
from plimsoll.config.json_text import parse_json
from plimsoll.data.fields import RowProblem, checked_text, kind_of, list_of, present
from plimsoll.data.pieces import (
    SYSTEM_ROLES,
    TOOL_ROLES,
    UNLEARNED,
    Messages,
    answer_text,
    call_arguments,
    tool_name,
)

ROLES = ("system", "user", "assistant", "tool", "developer", "ipython")
MARKS = ("weight", "loss", "loss_mask", "train", "training", "trainable")
"""Keys of a turn that say whether it is learned, in OpenAI's form, ShareGPT's, ms-swift's,
Axolotl's and others.
"""
_CALLS = ("function_call", "tool_call")
_OPENAI_ROLES = {
    **dict.fromkeys(_CALLS, "assistant"),
    **dict.fromkeys(("function", "tool_response"), "tool"),
}
_SHARED_ROLES = {
    **{role: role for role in ROLES},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", *_CALLS), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
}
"""The role of each turn's name in ShareGPT's form and its variants."""


def messages_of(values: Mapping[str, object], column: str) -> Messages:
    """Return a column's messages: at least one, each with a known role and text."""
    messages: list[dict[str, object]] = []
    for i, turn in enumerate(list_of(values, column, "messages")):
        message = _message(turn, f"{column}[{i}]")
        if message["role"] in SYSTEM_ROLES and not message["content"]:
            continue
        if messages and _continues_turn(turn, messages[-1], message):
            calls = [*messages[-1].get("tool_calls", ()), *message["tool_calls"]]  # type: ignore
            messages[-1] = {**messages[-1], "tool_calls": calls}
        else:
            messages.append(message)
    if not messages:
        raise RowProblem(column, "has no turn but empty system messages")
    return messages


def _continues_turn(
    turn: object, before: Mapping[str, object], message: Mapping[str, object]
) -> bool:
    """Return whether a turn is a call that belongs to the message before it.

    Libraries with turns for calls write the assistant's text and each call as turns of their own.
    """
    is_call = isinstance(turn, dict) and turn.get("role", turn.get("from")) in _CALLS
    return is_call and all(before.get(key) == message.get(key) for key in ("role", *UNLEARNED))


def _message(turn: object, place: str) -> dict[str, object]:
    if not isinstance(turn, dict):
        raise RowProblem(place, f"must be an object with role and content, but is {kind_of(turn)}")
    name_key, text_key = "role", "content"
    if turn.get("role") is None and turn.get("from") is not None:
        name_key, text_key = "from", "value"
    name = checked_text(present(turn, name_key, place), f"{place}.{name_key}")
    role = _role(name, name_key, place)
    # A null means that a key is missing, and templates test for keys.
    values = {name: value for name, value in turn.items() if value is not None}
    further = {k: v for k, v in values.items() if k not in (name_key, text_key, *MARKS)}
    message = {"role": role, "content": "", **further, **_mark(values, role, place)}
    if name in _CALLS:
        text = present(turn, text_key, place)
        return {**message, "tool_calls": _calls(text, f"{place}.{text_key}")}
    if (called := message.pop("function_call", None)) is not None:
        message.setdefault("tool_calls", _calls(called, f"{place}.function_call"))
    if message.get("tool_calls"):
        message["tool_calls"] = _calls(message["tool_calls"], f"{place}.tool_calls")
        if turn.get(text_key) in (None, ""):
            return message  # a turn of calls without text
    return {**message, "content": _content(turn, role, text_key, place)}


def _role(name: str, key: str, place: str) -> str:
    """Return the role of a turn from its name.

    `key` holds the name: "role" in OpenAI's form, "from" in ShareGPT's.
    """
    known = _SHARED_ROLES if key == "from" else {role: role for role in ROLES} | _OPENAI_ROLES
    if name not in known:
        offered = tuple(_SHARED_ROLES) if key == "from" else ROLES
        raise RowProblem(
            f"{place}.{key}",
            f"is `{name}`, which is none of {', '.join(offered)}.{nearest(name, offered)}",
        )
    return known[name]


def _mark(turn: Mapping[str, object], role: str, place: str) -> dict[str, object]:
    """Return `UNLEARNED` if an assistant's turn is marked as not to be learned, else no key."""
    if role != "assistant":
        return {}  # never learned, whatever its marks say
    marks = {name: turn[name] for name in MARKS if name in turn}
    for name, value in marks.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            number = f" ({value})" if isinstance(value, int | float) else ""
            raise RowProblem(
                f"{place}.{name}",
                f"says whether the turn is learned: true, false, 1 or 0. It is "
                f"{kind_of(value)}{number}",
            )
    if len({bool(value) for value in marks.values()}) > 1:
        contradiction = " and ".join(
            f"`{name}: {json.dumps(value)}`" for name, value in marks.items()
        )
        raise RowProblem(place, f"is to be learned and not to be learned: {contradiction}")
    return dict(UNLEARNED) if marks and not any(marks.values()) else {}


def _calls(value: object, place: str) -> list[Mapping[str, object]]:
    """Return the calls of a turn that holds them as JSON: one call or a list."""
    try:
        parsed = parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise RowProblem(place, f"{_WANTED}. It is no valid JSON: {error}") from error
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls:
        raise RowProblem(place, f"{_WANTED}. It is empty")
    return [_call(call, place) for call in calls]


_WANTED = (
    "is the assistant's call of a tool: an object with `name` and `arguments`, a list of them, or "
    "JSON text of either"
)


def _call(call: object, place: str) -> Mapping[str, object]:
    try:
        tool_name(call)  # type: ignore[arg-type]
    except (AttributeError, LookupError, TypeError) as error:
        raise RowProblem(place, f"{_WANTED}. It is {kind_of(call)} without a name") from error
    checked: Mapping[str, Any] = call  # type: ignore[assignment]
    function = checked.get("function", checked)
    try:
        arguments = call_arguments(function.get("arguments"))
    except ValueError as error:
        why = f"has arguments that are no object, nor JSON text of one: {error}"
        raise RowProblem(place, why) from error
    around = checked if "function" in checked else {"type": "function"}
    return {**around, "function": {**function, "arguments": arguments}}


def _content(turn: Mapping[str, object], role: str, key: str, place: str) -> str:
    """Return a turn's text. The text parts of a list are joined by line breaks.

    OpenAI's messages may have such lists, and vLLM joins them so for a template that writes text.
    """
    value = answer_text(turn.get(key)) if role in TOOL_ROLES else turn.get(key)
    if isinstance(value, list):
        parts = [_text_part(part, f"{place}.{key}[{i}]") for i, part in enumerate(value)]
        value = "\n".join(parts)
    if role not in ("user", "assistant") and not str(value or "").strip():
        return ""
    return checked_text(present({**turn, key: value}, key, place), f"{place}.{key}")


def _text_part(part: object, place: str) -> str:
    if not isinstance(part, dict):
        raise RowProblem(place, f"must be a part with type and text, but is {kind_of(part)}")
    kind = part.get("type", "text")
    if kind not in ("text", "input_text", "output_text"):
        raise RowProblem(place, f"is a part of type `{kind}`, and only text is read")
    text = present(part, "text", place)
    if not isinstance(text, str):
        raise RowProblem(f"{place}.text", f"must be text, but is {kind_of(text)}")
    return text
