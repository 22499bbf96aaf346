"""The padding tokens that a reward model's inputs may have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from plimsoll.commands.demo import make_tokenizer
from plimsoll.commands.export import padding_token as merged_padding
from plimsoll.records import Sample
from plimsoll.train.loading import padding_token


def sample(tokens: Sequence[int], loss_mask: Sequence[int]) -> Sample:
    return Sample(np.array(tokens), np.array(loss_mask, dtype=np.bool_))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that pads with the token that ends a response, as many do."""
    return make_tokenizer()


def test_a_merged_model_is_not_padded_with_what_ends_sequences_or_turns() -> None:
    tokenizer = make_tokenizer()
    assert merged_padding(tokenizer, "none") is merged_padding(tokenizer, None) is None
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert merged_padding(tokenizer, "none") == tokenizer.pad_token_id
    turns = "{% for m in messages %}{{ m.content + '<pad>' }}{% endfor %}"
    assert merged_padding(tokenizer, turns) is None
    assert merged_padding(tokenizer, turns.replace("<pad>", "<end>")) == tokenizer.pad_token_id
    tokenizer.chat_template = turns
    assert merged_padding(tokenizer, None) is None


def test_padding_that_scores_are_read_at_is_no_padding(tokenizer: PreTrainedTokenizerFast) -> None:
    end = tokenizer.eos_token_id
    assert end == tokenizer.pad_token_id
    assert padding_token(tokenizer, [sample([1, 2, end], [0, 0, 1])]) is None
    assert padding_token(tokenizer, [sample([1, 2], [0, 1]), sample([end, 3], [0, 1])]) == end
    bare = make_tokenizer()
    bare.pad_token = None
    assert padding_token(bare, [sample([1, 2], [0, 1])]) is None
