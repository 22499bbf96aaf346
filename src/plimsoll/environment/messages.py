"""Translate an episode's messages: from and to the OpenAI API, and to tokens and back.

Chat templates get their own form of messages. Source: the OpenAI API reference, "Create chat
completion".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from plimsoll.data.pieces import TOOL_ROLES, Messages, Tools, answer_text, call_arguments
from plimsoll.data.template import Template
from plimsoll.environment.protocol import Message, Reply, ToolCall
from plimsoll.errors import DataError
from plimsoll.records import TokenIds
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
    message = render_message(reply.message)
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return message


_CHARACTERS_PER_TOKEN = 32
"""How many characters of a long text are tokenized for each token that is kept."""

ReadReply = Callable[[str, Tools], Reply]
"""A function that parses a reply's text, given the tools that the policy may call."""


@dataclass(frozen=True)
class TurnCodec:
    """An encoder of messages to the policy, and a decoder of its replies."""

    template: Template
    """The run's template, with the environment's tools."""
    ends: tuple[int, ...]
    """The tokens at which sampling stops."""
    read_reply: ReadReply
    max_observation_tokens: int
    """The most tokens of one message of the environment."""
    keeps_end: bool = False
    """Whether the environment wants replies with the token that ends a turn."""

    def with_tools(self, tools: Tools) -> TurnCodec:
        """Return a codec whose prompts describe these tools.

        Raises DataError if the template is plain text, which leaves them out.
        """
        return replace(self, template=self.template.with_tools(tools)) if tools else self

    def decode_reply(self, sampled: TokenIds, tools: Tools) -> Reply:
        """Return the policy's reply, with its calls of the tools."""
        tokens = [token for token in sampled.tolist() if token not in self.ends]
        reply = self.read_reply(self.decode(tokens), tools)
        return replace(reply, text=self.decode(sampled.tolist())) if self.keeps_end else reply

    def encode_prompt(self, messages: Messages) -> list[int]:
        """Return the tokens of a prompt: all its messages, rendered by the chat template.

        Raises DataError if the template refuses the messages.
        """
        [(tokens, _)] = self.template.tokenize([self.template.render_prompt([*messages])])
        return [int(token) for token in tokens]

    def shorten(self, message: Message) -> Message:
        """Return the message; the middle of its text is cut beyond `max_observation_tokens`."""
        text, most = message.content, self.max_observation_tokens
        room = most * _CHARACTERS_PER_TOKEN
        ends = text if len(text) <= room else text[: room // 2] + text[-room // 2 :]
        tokens = self.encode(ends)
        if len(ends) == len(text) and len(tokens) <= most:
            return message
        half = max(1, most // 2)
        head, tail = self.decode(tokens[:half]), self.decode(tokens[-half:])
        left_out = max(0, len(text) - len(head) - len(tail))
        mark = f"\n[{left_out:,} characters left out]\n"
        return replace(message, content=head + mark + tail)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text without the chat template."""
        tokens = self.template.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [int(token) for token in tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self.template.tokenizer.decode(tokens, skip_special_tokens=False))


def readable_text(message: Message) -> str:
    """Return a message's text for people: a tool's result follows the tool's name."""
    return f"{message.name}: {message.content}" if message.name else message.content


def render_message(message: Message) -> dict[str, Any]:
    """Return a message as a dict for chat templates."""
    rendered: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        rendered["name"] = message.name
    if message.call_id:
        rendered["tool_call_id"] = message.call_id
    if message.tool_calls:
        rendered["tool_calls"] = [_render_call(call) for call in message.tool_calls]
    return rendered


def _render_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    rendered: dict[str, Any] = {"type": "function", "function": function}
    return {**rendered, "id": call.id} if call.id else rendered


def with_call_ids(reply: Reply, turn: int) -> Reply:
    """Return the reply with an id for each call.

    The id is the policy's if it wrote one. Otherwise it is made of the turn's and the call's
    numbers: nine letters and digits, as Mistral's templates require.
    """
    calls = tuple(
        call if call.id else replace(call, id=f"c{turn % 10_000:04}{place % 10_000:04}")
        for place, call in enumerate(reply.tool_calls)
    )
    return replace(reply, message=replace(reply.message, tool_calls=calls), tool_calls=calls)


def match_results(answer: Sequence[Message], calls: Sequence[ToolCall]) -> list[Message]:
    """Return the answer's messages, with the ids of the calls that tool results answer.

    Results without an id answer the calls that no other result answers, in their order.
    """
    answered = {message.call_id for message in answer}
    left = (call.id for call in calls if call.id not in answered)
    return [
        replace(message, call_id=next(left, ""))
        if message.role == "tool" and not message.call_id
        else message
        for message in answer
    ]
