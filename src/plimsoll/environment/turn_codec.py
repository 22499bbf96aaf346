"""Encode an episode's messages as tokens, and decode the policy's replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plimsoll.data.pieces import Messages, Tools
from plimsoll.data.template import Template
from plimsoll.environment.protocol import Message, Reply, ToolCall
from plimsoll.records import Ints

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

    def decode_reply(self, sampled: Ints, tools: Tools) -> Reply:
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
