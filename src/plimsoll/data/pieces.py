"""Messages as pieces of text, with the characters that are learned, and the tokens of such pieces.

A learned range of characters becomes the tokens that start in it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from plimsoll.config.json_text import parse_json
from plimsoll.data.fields import kind_of
from plimsoll.errors import ConfigError, DataError
from plimsoll.records import Bools, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ChatTurn = Mapping[str, Any]
"""A message in OpenAI's form: `role`, `content` as text, and further keys for the template."""

Messages = Sequence[ChatTurn]

SYSTEM_ROLES = ("system", "developer")
"""The roles of system messages: the usual one, and that of OpenAI's newer models."""

TOOL_ROLES = ("tool", "ipython")
"""The roles of tools' answers: the usual one, and that of Llama 3."""

USUAL_ROLE: Mapping[str, str] = MappingProxyType({"developer": "system", "ipython": "tool"})
"""The usual role in place of each that only some chat templates have."""

UNLEARNED: Mapping[str, bool] = MappingProxyType({"train": False})
"""The key and value that mark an assistant's turn as not to be learned."""

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, with a `name` at the top or under `function`."""

TextSpan = tuple[int, int]
"""A half-open range of characters."""


@dataclass(frozen=True)
class TextPiece:
    """Text that is tokenized by itself."""

    text: str
    loss_spans: tuple[TextSpan, ...] = ()
    """The ranges that are learned."""
    closed: bool = False
    """Whether the end-of-sequence token comes after the text. It is learned, too."""
    scored: bool = False
    """Whether a score is read at the last token, which is then marked as if it were learned."""


def is_learned(turn: ChatTurn) -> bool:
    """Return whether a turn is the assistant's and not marked as `UNLEARNED`."""
    return turn["role"] == "assistant" and not UNLEARNED.items() <= turn.items()


def mark_unlearned(messages: Messages) -> Messages:
    """Return the messages with every assistant turn marked as not to be learned."""
    return [{**turn, **UNLEARNED} if is_learned(turn) else turn for turn in messages]


def drop_marks(messages: Messages) -> Messages:
    """Return the messages without the key of `UNLEARNED`."""
    return [{key: turn[key] for key in turn if key not in UNLEARNED} for turn in messages]


def readable_text(messages: Messages) -> str:
    """Return messages as a person reads them: a lone turn as it is, else roles and contents."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in messages)


def prompt_number(text: str) -> int:
    """Return a number that identifies a prompt's readable text."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def join_plain(turns: Messages) -> tuple[TextPiece, ...]:
    """Return pieces of the contents, joined with nothing between.

    The assistant's turns are pieces of their own, learned unless they are marked otherwise.

    Raises:
        DataError: a turn has tool calls, which plain text cannot show.
    """
    if any(turn.get("tool_calls") for turn in turns):
        raise DataError("has tool_calls, which plain text leaves out: write them into the content")
    pieces = []
    for (_, learned), group in itertools.groupby(
        turns, key=lambda turn: (turn["role"] == "assistant", is_learned(turn))
    ):
        piece = TextPiece("".join(turn["content"] for turn in group))
        pieces.append(learn_whole(piece) if learned else piece)
    return tuple(pieces)


def check_calls(turns: Messages, text: str, end: int | None = None) -> None:
    """Raise DataError for a tool call that its conversation's text, up to `end`, leaves out."""
    for call in (call for turn in turns for call in turn.get("tool_calls", ())):
        name = tool_name(call)
        if text.find(name, 0, end) < 0:
            raise DataError(
                f"calls the tool {name!r}, and the chat template leaves calls out: write it into"
                f" the content, or set `data.chat_template` to a template that has them"
            )


def check_tools(tools: Tools, text: str) -> None:
    """Raise DataError for a tool that the text leaves out."""
    for name in map(tool_name, tools):
        if name not in text:
            raise DataError(
                f"may call the tool {name!r}, and the chat template leaves tools out: set"
                f" `data.chat_template` to a template that has them, or leave the column out"
            )


def dense_text(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())


def quote(text: object) -> str:
    """Return the beginning of a text, 60 characters at most, in quotes for a message."""
    return repr(str(text)[:60])


def count_alike(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many items at the beginning of both are equal."""
    item_pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], item_pairs))


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool, or of a call of a tool. Raise KeyError if it has none."""
    return str(tool.get("function", tool)["name"])


def call_arguments(given: object) -> dict[str, Any]:
    """Return the arguments of a call as an object, where they may be JSON text of one, or missing.

    Raises:
        ValueError: they are not an object.
    """
    values = {} if given in (None, "") else given
    values = parse_json(values) if isinstance(values, str) else values
    if not isinstance(values, dict):
        raise ValueError(f"an object is needed, not {kind_of(values)}")
    return values


def answer_text(given: object) -> object:
    """Return what a tool answered as text, or as a list of parts of text.

    Values that are neither become JSON text; no answer is empty text.
    """
    parts = (
        isinstance(given, list)
        and given
        and all(isinstance(part, dict) and ("type" in part or "text" in part) for part in given)
    )
    if isinstance(given, str) or parts:
        return given
    return "" if given is None else json.dumps(given, ensure_ascii=False)


def learn_whole(piece: TextPiece) -> TextPiece:
    """Return the piece with all of its text learned."""
    # The span ends one past the text, for tokens that cover no character.
    return replace(piece, loss_spans=((0, len(piece.text) + 1),))


def close_last(pieces: tuple[TextPiece, ...]) -> tuple[TextPiece, ...]:
    """Return the pieces up to the last learned one, closed by the end-of-sequence token."""
    last_learned = max((i for i, piece in enumerate(pieces) if piece.loss_spans), default=None)
    if last_learned is None:
        return pieces
    return (*pieces[:last_learned], replace(pieces[last_learned], closed=True))


def without_end(text: str, end: str | None) -> str:
    """Return a text that is to be ended without the end that it has already."""
    stripped = text.rstrip()
    return stripped.removesuffix(end) if end and stripped.endswith(end) else text


def without_tail(text: str, turn: TextSpan, specials: tuple[str, ...]) -> TextSpan:
    """Return a turn's span without the white space after the token that ends the turn.

    Sampling stops before that white space.
    """
    start, end = turn
    stripped = text[start:end].rstrip()
    return (start, start + len(stripped)) if stripped.endswith(specials) else turn


def with_end(text: str, marked: TextSpan, specials: tuple[str, ...]) -> TextSpan:
    """Return a marked range, extended by the special token that ends the turn if one follows."""
    start, end = without_tail(text, marked, specials)
    if text[start:end].endswith(specials):
        return start, end
    following = next((token for token in specials if text.startswith(token, end)), "")
    return start, end + len(following)


def check_begins(text: str, beginning: str, turn: int) -> None:
    """Raise ConfigError unless the text begins with `beginning`, the text up to a turn."""
    if text.startswith(beginning):
        return
    common = count_alike(text, beginning)
    raise ConfigError(
        f"The chat template rewrites earlier turns, so it cannot be seen which tokens are the"
        f" assistant's: rendered up to turn {turn}, the text goes on with"
        f" {beginning[common : common + 40]!r} where, with what follows, it goes on with"
        f" {text[common : common + 40]!r}. Set `data.chat_template` to a template that puts the"
        f" assistant's text between `{{% generation %}}` and `{{% endgeneration %}}`."
    )


Tokenized = tuple[TokenIds, Bools]
"""The tokens, and whether each is learned; both of shape [n]."""

TOKENIZED_AT_ONCE = 2**20
"""Characters that one call tokenizes. The tokenizer's result takes some 200 bytes per token."""


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    rendered: Sequence[tuple[TextPiece, ...]],
    begin: int | None,
    vocabulary: int | None,
) -> list[Tokenized]:
    """Return the tokens of each sequence of pieces, and which tokens are learned.

    The first token is never learned, as nothing predicts it.

    Args:
        tokenizer: the tokenizer of the model.
        rendered: the pieces of each sequence.
        begin: the token that every sequence begins with; None adds no token.
        vocabulary: the number of tokens that the model knows; None if it is unknown.

    Raises:
        ConfigError: the tokenizer gives a token that the model does not know.
    """
    pieces = (piece for row in rendered for piece in row)
    batches = (_encode(tokenizer, batch) for batch in _batches(pieces))
    encoded = itertools.chain.from_iterable(batches)
    sequences = [_concatenate([next(encoded) for _ in row], begin) for row in rendered]
    for tokens, _ in sequences:
        _check_embedded(tokenizer, tokens, vocabulary)
    return sequences


def _batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Yield batches of pieces with about `TOKENIZED_AT_ONCE` characters each."""
    batch: list[TextPiece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= TOKENIZED_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(tokenizer: PreTrainedTokenizerBase, pieces: Sequence[TextPiece]) -> list[Tokenized]:
    end = tokenizer.eos_token
    encoded = tokenizer(
        [without_end(piece.text, end) if piece.closed else piece.text for piece in pieces],
        add_special_tokens=False,  # templates write their own; plain text gets `begin`
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    encodings = zip(pieces, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [_mark(piece, ids, offsets, tokenizer.eos_token_id) for piece, ids, offsets in encodings]


def _mark(piece: TextPiece, ids: list[int], offsets: list[TextSpan], end: int | None) -> Tokenized:
    closing = [end] if piece.closed else []
    tokens = np.array(ids + closing, dtype=np.int32)
    starts = np.array([start for start, _ in offsets], dtype=np.int64)
    loss_mask = np.ones(len(tokens), dtype=np.bool_)
    begins, ends = np.sort(np.array(piece.loss_spans, dtype=np.int64).reshape(-1, 2), axis=0).T
    # More ranges have begun than have ended.
    begun, ended = (np.searchsorted(borders, starts, "right") for borders in (begins, ends))
    loss_mask[: len(ids)] = begun > ended
    loss_mask[-1:] |= piece.scored
    return tokens, loss_mask


def _concatenate(parts: Sequence[Tokenized], begin: int | None) -> Tokenized:
    tokens = np.concatenate([tokens for tokens, _ in parts])
    loss_mask = np.concatenate([loss_mask for _, loss_mask in parts])
    if begin is not None and (len(tokens) == 0 or tokens[0] != begin):
        tokens, loss_mask = np.insert(tokens, 0, begin), np.insert(loss_mask, 0, False)
    loss_mask[:1] = False
    return tokens, loss_mask


def _check_embedded(
    tokenizer: PreTrainedTokenizerBase, tokens: TokenIds, vocabulary: int | None
) -> None:
    largest = int(tokens.max(initial=0))
    if vocabulary is not None and largest >= vocabulary:
        raise ConfigError(
            f"The tokenizer {tokenizer.name_or_path} gives the token {largest} "
            f"(`{tokenizer.convert_ids_to_tokens(largest)}`), and the model knows those "
            f"below {vocabulary} (vocab_size of its config.json): take the tokenizer "
            f"that belongs to the model, or enlarge the model with `resize_token_embeddings` "
            f"of transformers, and save both into one directory."
        )
