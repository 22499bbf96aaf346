"""NEFTune on real engines: ZeRO-3 on two ranks, with and without an adapter, sees the noise that
one undivided rank sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import BATCHES, RATES, Setting, own_packs, zero_stage
from engine_reference import summed
from ranks import RankProcesses

from plimsoll.config.engine import AdapterConfig
from plimsoll.model.policy import EmbeddingNoise
from plimsoll.records import Pack
from plimsoll.trainer.objectives import NllObjective
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import UpdateResult, Worker

ADAPTER = AdapterConfig(rank=4, alpha=8)


def noise_of(pack: Pack) -> EmbeddingNoise:
    """Sample i has the seed 7 + i; a filler's noise is not learned from."""
    places = [max(0, int(i)) for i in pack.samples_S]
    lengths = (pack.cu_seqlens[1:] - pack.cu_seqlens[:-1]).tolist()
    return EmbeddingNoise(5.0, tuple(lengths), tuple(7 + place for place in places))


def train_noisily(place: Place, model: Path, setting: Setting) -> list[UpdateResult]:
    worker = Worker(place)
    worker.load_model("actor", setting.role(model), temperature=1.0)
    results = []
    for batch, rate in zip(BATCHES[:2], RATES[:2], strict=True):
        packs = own_packs(place, batch, setting.micro_batch_tokens)
        streams = [noise_of(pack) for pack in packs]
        results.append(worker.train("actor", packs, streams, batch.counts, NllObjective(), rate))
    return results


@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["full", "lora"])
def test_two_ranks_at_stage_3_learn_what_one_learns(
    one_rank: RankProcesses, two_ranks: RankProcesses, tied: Path, adapter: AdapterConfig | None
) -> None:
    alone = Setting(zero_stage(0), micro_batch_tokens=400, adapter=adapter)
    [whole] = one_rank.run(train_noisily, tied, alone)
    divided = replace(alone, zero=zero_stage(3), micro_batch_tokens=31, checkpointing=True)
    results = two_ranks.run(train_noisily, tied, divided)
    for got, step, want in zip(summed(results), zip(*results, strict=True), whole, strict=True):
        assert got["loss"] == pytest.approx(want.metrics["loss"], rel=1e-5)
        assert step[0].grad_norm == pytest.approx(want.grad_norm, rel=1e-4)
