"""A card that is really full while it trains: the step is done anew with smaller micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_cases import Setting, make_batch, zero_stage
from ranks import RankProcesses
from shortage_cases import Survived, train_through
from test_engine_shortage import ROUNDING, distance

from plimsoll.trainer.process_group import Place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
    ),
]

BATCHES = tuple(make_batch([500] * 64, seed) for seed in (1, 2))


def peak(place: Place, model: Path, setting: Setting, out: Path) -> int:
    """The most bytes of the card that training takes."""
    torch.cuda.reset_peak_memory_stats()
    train_through(place, model, setting, BATCHES, (), out)
    return torch.cuda.max_memory_reserved()


def train_in(place: Place, model: Path, setting: Setting, most: int, out: Path) -> Survived:
    """Train with no more than `most` bytes of the card."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(most / torch.cuda.mem_get_info()[1])
    try:
        return train_through(place, model, setting, BATCHES, (), out)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_full_card_halves_the_micro_batch_and_keeps_the_gradient(
    stage: int, tied: Path, card_rank: RankProcesses, tmp_path: Path
) -> None:
    whole = Setting(zero_stage(stage), "bfloat16", micro_batch_tokens=32_000)
    half = replace(whole, micro_batch_tokens=16_000)
    [small] = card_rank.run(peak, tied, half, tmp_path / "half")
    [large] = card_rank.run(peak, tied, whole, tmp_path / "whole")
    [seen] = card_rank.run(train_in, tied, whole, (small + large) // 2, tmp_path / "spoilt")
    assert seen.before == [32_000] and seen.limits == [16_000] * 2
    assert distance(tmp_path / "whole", tmp_path / "spoilt") < ROUNDING["bfloat16"]
