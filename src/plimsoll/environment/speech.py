"""How an environment's episodes are written as tokens, and what the policy said is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plimsoll.data.continuation import following, is_rewritten
from plimsoll.data.pieces import Messages, Tools
from plimsoll.data.template import Template
from plimsoll.environment.protocol import Message, Reply, ToolCall
from plimsoll.records import Ints

_CHARACTERS_PER_TOKEN = 32
"""No more are tokenized to find where a long text is to be cut."""


Read = Callable[[str, Tools], Reply]
"""A reply from its text, with the tools that it may call."""


@dataclass(frozen=True)
class Speech:
    """template: of the run, knowing the environment's tools. ends: tokens at which sampling stops.
    most: tokens of what the environment says at once. keeps_end: it wants replies with the token
    that ends a turn."""

    template: Template
    ends: tuple[int, ...]
    reads: Read
    most: int
    keeps_end: bool = False

    def knowing(self, tools: Tools) -> Speech:
        """The same for prompts that describe these. DataError where plain text leaves them out."""
        return replace(self, template=self.template.with_tools(tools)) if tools else self

    def read(self, sampled: Ints, tools: Tools) -> Reply:
        """What the policy said, from the tokens of its turn. tools: that it may call."""
        said = [token for token in sampled.tolist() if token not in self.ends]
        reply = self.reads(self.text(said), tools)
        return replace(reply, text=self.text(sampled.tolist())) if self.keeps_end else reply

    def begins(self, messages: Messages) -> list[int]:
        """A whole prompt. DataError where the template refuses it."""
        [(tokens, _)] = self.template.tokenize([self.template.render_prompt([*messages])])
        return [int(token) for token in tokens]

    def follows(
        self, before: Messages, reply: Reply, said: Sequence[Message], sampled: Ints
    ) -> list[int]:
        """What comes after a sampled turn: its end, what the environment said, and the beginning of
        the next turn. DataError where the template refuses it."""
        raw = "".join(one.content for one in said if one.role == "raw")
        if raw:
            return self.tokens(raw)
        after = [rendered(one) for one in said]
        return self.continues(before, rendered(reply.message), after, sampled)

    def continues(
        self, before: Messages, said: Mapping[str, Any], after: Messages, sampled: Ints
    ) -> list[int]:
        """The same of messages as chat templates take them."""
        tokens = sampled.tolist()
        return list(following(self.template, before, said, after, tokens, self.ends))

    def is_rewritten(self, before: Messages, said: Mapping[str, Any], after: Messages) -> bool:
        """Whether the template writes what came before anew once this follows."""
        return is_rewritten(self.template, before, said, after)

    def cut(self, message: Message) -> Message:
        """The same, no longer than `most` tokens: the middle of a longer text is left out."""
        text = message.content
        room = self.most * _CHARACTERS_PER_TOKEN
        ends = text if len(text) <= room else text[: room // 2] + text[-room // 2 :]
        tokens = self.tokens(ends)
        if len(ends) == len(text) and len(tokens) <= self.most:
            return message
        half = max(1, self.most // 2)
        head, tail = self.text(tokens[:half]), self.text(tokens[-half:])
        left_out = max(0, len(text) - len(head) - len(tail))
        mark = f"\n[{left_out:,} characters left out]\n"
        return replace(message, content=head + mark + tail)

    def tokens(self, text: str) -> list[int]:
        """Of text that goes on as it is."""
        found = self.template.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [int(token) for token in found]

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.template.tokenizer.decode(tokens, skip_special_tokens=False))


def readable(message: Message) -> str:
    """As a person reads it: what a tool says, after its name."""
    return f"{message.name}: {message.content}" if message.name else message.content


def rendered(message: Message) -> dict[str, Any]:
    """As chat templates take it."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        found["name"] = message.name
    if message.call_id:
        found["tool_call_id"] = message.call_id
    if message.tool_calls:
        found["tool_calls"] = [_rendered_call(call) for call in message.tool_calls]
    return found


def _rendered_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    found: dict[str, Any] = {"type": "function", "function": function}
    return {**found, "id": call.id} if call.id else found


def identified(reply: Reply, turn: int) -> Reply:
    """The same, each call with an id: the policy's own, or one of the turn's number and the call's,
    which has nine letters and digits, as Mistral's templates ask."""
    calls = tuple(
        call if call.id else replace(call, id=f"c{turn % 10_000:04}{place % 10_000:04}")
        for place, call in enumerate(reply.tool_calls)
    )
    return replace(reply, message=replace(reply.message, tool_calls=calls), tool_calls=calls)


def answering(said: Sequence[Message], calls: Sequence[ToolCall]) -> list[Message]:
    """The same, results of tools with the ids of the calls that they answer: those without one, in
    the order of the calls that no other answers."""
    named = {message.call_id for message in said}
    left = (call.id for call in calls if call.id not in named)
    return [
        replace(one, call_id=next(left, "")) if one.role == "tool" and not one.call_id else one
        for one in said
    ]
