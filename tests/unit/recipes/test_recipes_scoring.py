"""What a reward model's rows become, what its inputs may be padded with, and its drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from plimsoll.algorithm.calibration import calibrate_pairs
from plimsoll.commands.arithmetic import make_tokenizer
from plimsoll.commands.merge import padding_token as merged_padding
from plimsoll.data.packing import pack_pairs
from plimsoll.jobs.rm_loop import pairs_of, up_to_end
from plimsoll.records import Pair, Sample
from plimsoll.train.loading import padding_token
from plimsoll.train.reliability import show_calibration
from plimsoll.train.update import in_batch_order


def sample(tokens: Sequence[int], learned: Sequence[int]) -> Sample:
    return Sample(np.array(tokens), np.array(learned, dtype=np.bool_))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Pads with the token that ends a response, as many do."""
    return make_tokenizer()


def test_a_response_is_cut_where_its_score_is_read() -> None:
    """ChatML's line break after the end of a turn is not learned, and nothing reads it."""
    cut = up_to_end(sample([5, 6, 7, 8, 9], [0, 0, 1, 1, 0]))
    assert cut.tokens.tolist() == [5, 6, 7, 8]
    assert cut.learned.tolist() == [False, False, False, True]


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


@pytest.mark.parametrize("share_prompts", [False, True])
def test_every_pack_knows_its_pairs(share_prompts: bool) -> None:
    """On three ranks, one of which gets a filler; the prompt is 1 2."""
    pairs = [
        Pair(up_to_end(sample([1, 2, a], [0, 0, 1])), up_to_end(sample([1, 2, b], [0, 0, 1])))
        for a, b in ((3, 4), (5, 6))
    ]
    packs = pack_pairs(pairs, 3, 6, share_prompts=share_prompts)
    found = [[list(pairs_of(pack)) for pack in own] for own in packs]
    assert sorted(pairs for own in found for pairs in own) == [[], [0], [1]]
    ends = [
        [pack.tokens_T[pack.cu_seqlens[1:] - 1].astype(np.float32) for pack in o] for o in packs
    ]
    assert in_batch_order(packs, ends).tolist() == [3, 4, 5, 6]


def test_calibration_is_drawn(tmp_path: Path) -> None:
    found = calibrate_pairs(np.array([1, 2, -1, 0.1], dtype=np.float32))
    file = tmp_path / "calibration.png"
    assert show_calibration(found, "4 pairs", file) == {"calibration_error": found.error}
    assert file.read_bytes()[:4] == b"\x89PNG" and file.stat().st_size > 5_000
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.png"]
