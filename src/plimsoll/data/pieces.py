"""Messages as text: pieces to tokenize, and which of their characters are the assistant's."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import xxhash

from plimsoll.errors import ConfigError, DataError

Messages = Sequence[Mapping[str, Any]]
"""OpenAI-style turns: `role` and `content` as text; other keys are passed on to the template."""

UNLEARNED: Mapping[str, bool] = MappingProxyType({"train": False})
"""The key of an assistant's turn that is not learned."""

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, with a `name`; or objects with such a one under `function`."""

Span = tuple[int, int]
"""A half-open range of characters."""


@dataclass(frozen=True)
class Piece:
    """Text that is tokenized by itself. learned: what of it is learned. closed: the
    end-of-sequence token comes after it and is learned too. scored: its last token is marked as one
    that a score is read at, as if it were learned."""

    text: str
    loss_spans: tuple[Span, ...] = ()
    closed: bool = False
    scored: bool = False


def is_learned(turn: Mapping[str, Any]) -> bool:
    """Whether a turn is the assistant's, and not marked as `UNLEARNED`."""
    return turn["role"] == "assistant" and not UNLEARNED.items() <= turn.items()


def unlearned(messages: Messages) -> Messages:
    """Return the messages with no turn to be learned."""
    return [{**turn, **UNLEARNED} if is_learned(turn) else turn for turn in messages]


def unmarked(messages: Messages) -> Messages:
    """Return the messages without marks of what is learned."""
    return [{key: turn[key] for key in turn if key not in UNLEARNED} for turn in messages]


def readable(messages: Messages) -> str:
    """Messages as a person reads them: a lone user turn as it is, otherwise roles and contents."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in messages)


def prompt_number(text: str) -> int:
    """Of a readable prompt: the same number for the same text, and another for another."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def join_plain(turns: Messages) -> tuple[Piece, ...]:
    """Contents one after the other with nothing between; the assistant's in pieces of their own,
    learned if they are to be. Raises DataError for tool calls, which are beside it."""
    if any(turn.get("tool_calls") for turn in turns):
        raise DataError("has tool_calls, which plain text leaves out: write them into the content")
    pieces = []
    for (_, learned), group in itertools.groupby(
        turns, key=lambda turn: (turn["role"] == "assistant", is_learned(turn))
    ):
        piece = Piece("".join(turn["content"] for turn in group))
        pieces.append(learn_whole(piece) if learned else piece)
    return tuple(pieces)


def check_calls(turns: Messages, text: str) -> None:
    """DataError for a tool call that the text of its conversation leaves out."""
    for call in (call for turn in turns for call in turn.get("tool_calls", ())):
        name = tool_name(call)
        if name not in text:
            raise DataError(
                f"calls the tool {name!r}, and the chat template leaves calls out: write it into"
                f" the content, or set `data.chat_template` to a template that has them"
            )


def check_tools(tools: Tools, text: str) -> None:
    """DataError for a tool that the text leaves out."""
    for name in map(tool_name, tools):
        if name not in text:
            raise DataError(
                f"may call the tool {name!r}, and the chat template leaves tools out: set"
                f" `data.chat_template` to a template that has them, or leave the column out"
            )


def tool_name(tool: Mapping[str, Any]) -> str:
    """Of a tool, or of a call of one. KeyError where it has none."""
    return str(tool.get("function", tool)["name"])


def learn_whole(piece: Piece) -> Piece:
    """The piece with all of its text learned."""
    # one past the end, for tokens that cover no character of their own
    return replace(piece, loss_spans=((0, len(piece.text) + 1),))


def close_last(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The pieces up to the last learned one, which the end-of-sequence token closes."""
    last = max((i for i, piece in enumerate(pieces) if piece.loss_spans), default=None)
    if last is None:
        return pieces
    return (*pieces[:last], replace(pieces[last], closed=True))


def without_tail(text: str, turn: Span, specials: tuple[str, ...]) -> Span:
    """A turn less the white space after the token that ends it: sampling stops before that."""
    start, end = turn
    stripped = text[start:end].rstrip()
    return (start, start + len(stripped)) if stripped.endswith(specials) else turn


def with_end(text: str, marked: Span, specials: tuple[str, ...]) -> Span:
    """A marked range up to the token that ends the turn, also where the mark stops before it."""
    start, end = without_tail(text, marked, specials)
    if text[start:end].endswith(specials):
        return start, end
    following = next((token for token in specials if text.startswith(token, end)), "")
    return start, end + len(following)


def check_begins(text: str, beginning: str, turn: int) -> None:
    """ConfigError unless the text up to a turn is how the text with what follows begins."""
    if text.startswith(beginning):
        return
    pairs = enumerate(zip(text, beginning, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), len(text))
    raise ConfigError(
        f"The chat template rewrites earlier turns, so it cannot be seen which tokens are the"
        f" assistant's: rendered up to turn {turn}, the text goes on with"
        f" {beginning[same : same + 40]!r} where, with what follows, it goes on with"
        f" {text[same : same + 40]!r}. Set `data.chat_template` to a template that puts the"
        f" assistant's text between `{{% generation %}}` and `{{% endgeneration %}}`."
    )
