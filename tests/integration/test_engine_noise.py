"""NEFTune on real engines: ZeRO-3 on two ranks, with and without an adapter, sees the noise that
one undivided rank sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import BATCHES, RATES, Setting, cut_for, own_packs, zero_stage
from engine_reference import summed
from ranks import RankProcesses

from plimsoll.config.engine import AdapterConfig
from plimsoll.trainer.objectives import NOISE_SEEDS, NllObjective
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import UpdateResult, Worker

ADAPTER = AdapterConfig(rank=4, alpha=8)


def train_noisily(place: Place, model: Path, setting: Setting) -> list[UpdateResult]:
    worker = Worker(place)
    worker.load_model("actor", setting.role(model), temperature=1.0)
    results = []
    for batch, rate in zip(BATCHES[:2], RATES[:2], strict=True):
        packs = own_packs(place, batch, setting.micro_batch_tokens)
        seeds = range(7, 7 + len(batch.samples))
        columns = cut_for(packs, {NOISE_SEEDS: seeds})
        results.append(worker.train("actor", packs, columns, batch.counts, NllObjective(5.0), rate))
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
