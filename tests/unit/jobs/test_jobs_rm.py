"""A reward model's rows: cut where a score is read, and paired again in every pack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from plimsoll.data.packing import pack_pairs
from plimsoll.jobs.rm_loop import cut_to_response, pairs_of
from plimsoll.records import Pair, Sample
from plimsoll.train.update import in_batch_order


def sample(tokens: Sequence[int], loss_mask: Sequence[int]) -> Sample:
    return Sample(np.array(tokens), np.array(loss_mask, dtype=np.bool_))


def test_a_response_is_cut_where_its_score_is_read() -> None:
    """ChatML's line break after the end of a turn is not learned, and nothing reads it."""
    cut = cut_to_response(sample([5, 6, 7, 8, 9], [0, 0, 1, 1, 0]))
    assert cut.tokens.tolist() == [5, 6, 7, 8]
    assert cut.loss_mask.tolist() == [False, False, False, True]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_every_pack_knows_its_pairs(share_prompts: bool) -> None:
    """One of the three ranks gets a filler; the prompt is 1 2."""
    pairs = [
        Pair(
            cut_to_response(sample([1, 2, a], [0, 0, 1])),
            cut_to_response(sample([1, 2, b], [0, 0, 1])),
        )
        for a, b in ((3, 4), (5, 6))
    ]
    packs = pack_pairs(pairs, 3, 6, share_prompts=share_prompts)
    by_rank = [[list(pairs_of(pack)) for pack in rank_packs] for rank_packs in packs]
    assert sorted(pairs for rank_pairs in by_rank for pairs in rank_pairs) == [[], [0], [1]]
    ends = [
        [pack.tokens_T[pack.cu_seqlens[1:] - 1].astype(np.float32) for pack in o] for o in packs
    ]
    assert in_batch_order(packs, ends).tolist() == [3, 4, 5, 6]
