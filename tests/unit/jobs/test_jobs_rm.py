"""A reward model's rows: cut where a score is read, and paired again in every pack."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest

from plimsoll.data.dataset import cut_to_response
from plimsoll.data.packing import pack_pairs
from plimsoll.jobs.rm_loop import margins_of
from plimsoll.records import Pair, Sample, from_packed
from plimsoll.trainer.objectives import MARGIN


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
            margin=margin,
        )
        for a, b, margin in ((3, 4, 0.5), (5, 6, 1.5))
    ]
    packs = pack_pairs(pairs, 3, 6, share_prompts=share_prompts)
    margins = np.repeat(margins_of(pairs), 2)
    by_pack = [MARGIN.cut(margins, pack).tolist() for pack in chain(*packs)]
    assert sorted(by_pack) == [[], [0.5, 0.5], [1.5, 1.5]]
    ends = [
        [pack.tokens_T[pack.cu_seqlens[1:] - 1].astype(np.float32) for pack in o] for o in packs
    ]
    assert np.concatenate(from_packed(chain(*packs), chain(*ends), "S")).tolist() == [3, 4, 5, 6]
