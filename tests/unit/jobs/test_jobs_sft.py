"""The seeds of NEFTune's noise: one for each sequence of each step, in any pack."""

from __future__ import annotations

import numpy as np
from decided import decided_model

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.config.engine import TrainedRole
from plimsoll.config.run import RunConfig
from plimsoll.data.packing import pack
from plimsoll.jobs.sft import SftAlgorithm, SftConfig
from plimsoll.jobs.sft_loop import noise_columns
from plimsoll.records import Sample, cut
from plimsoll.trainer.objectives import NOISE_SEEDS

SAMPLES = [
    Sample(np.arange(length), np.arange(length) > 0) for length in (9, 4, 23, 4, 12, 7, 30, 15, 2)
]


def config(alpha: float | None = 5.0, seed: int = 0) -> SftConfig:
    return SftConfig(
        run=RunConfig(directory="out", steps=1, seed=seed),
        data=DataConfig(train=SourceConfig(path="rows.jsonl", messages="turns")),
        actor=TrainedRole(model=decided_model(path="m")),
        algorithm=SftAlgorithm(neftune_alpha=alpha),
    )


def seeds(settings: SftConfig, step: int, ranks: int, budget: int) -> dict[int, int]:
    """Return the seed of each sample, by its place in the batch."""
    columns = noise_columns(settings, step, len(SAMPLES))
    return {
        place: seed
        for rank_packs in pack(SAMPLES, ranks, budget)
        for packed in rank_packs
        for place, seed in zip(
            packed.samples_S.tolist(), cut(columns, packed)[NOISE_SEEDS].tolist(), strict=False
        )
    }


def test_packs_and_ranks_change_no_seed() -> None:
    alone = seeds(config(), 3, ranks=1, budget=1000)
    assert sorted(alone) == [*range(len(SAMPLES))]
    assert seeds(config(), 3, ranks=1, budget=31) == alone
    assert seeds(config(), 3, ranks=4, budget=40) == alone


def test_sequences_steps_and_runs_have_seeds_of_their_own() -> None:
    settings = (config(), config(seed=1))
    every = [
        seed
        for run in settings
        for step in (1, 2, 3)
        for seed in seeds(run, step, ranks=1, budget=31).values()
    ]
    assert len(set(every)) == len(every) == 2 * 3 * len(SAMPLES)


def test_no_noise_unless_asked_for() -> None:
    assert noise_columns(config(alpha=None), 1, len(SAMPLES)) == {}
