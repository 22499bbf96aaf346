"""Tokenize rendered pieces. A learned range of characters becomes the tokens that start in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from plimsoll.data.pieces import TextPiece, TextSpan, without_end
from plimsoll.errors import ConfigError
from plimsoll.records import Bools, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    loss_mask = np.zeros(len(tokens), dtype=np.bool_)
    for start, stop in piece.loss_spans:
        loss_mask[: len(ids)] |= (starts >= start) & (starts < stop)
    loss_mask[len(ids) :] = True
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
