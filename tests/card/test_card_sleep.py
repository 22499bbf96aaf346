"""A rank on a card sleeps: its bytes leave the card, and are the same when it wakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_gpu_engine as on_cards
from ranks import RankProcesses

from plimsoll.config.cluster import RankSleep


@pytest.mark.parametrize(
    ("zero", "depth"), [("zero-0", "all"), ("zero-2", "states"), ("zero-3", "all")]
)
def test_a_rank_that_sleeps_leaves_the_card(
    zero: str, depth: RankSleep, tied: Path, tmp_path: Path, card_rank: RankProcesses
) -> None:
    on_cards.test_a_rank_that_sleeps_leaves_the_card(
        zero, "float32", depth, tied, tmp_path, card_rank
    )
