"""The seeds of NEFTune's noise: one for each sequence of each step, in any pack."""

from __future__ import annotations

import numpy as np
from decided import decided_model

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.config.engine import TrainedRole
from plimsoll.config.run import RunConfig
from plimsoll.data.packing import pack
from plimsoll.jobs.sft import SftAlgorithm, SftConfig
from plimsoll.jobs.sft_loop import embedding_noise
from plimsoll.records import Sample

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


def seeds(settings: SftConfig, step: int, ranks: int, budget: int) -> dict[int, tuple[int, int]]:
    """Return the length and seed of each sample, by its place in the batch."""
    by_place: dict[int, tuple[int, int]] = {}
    for rank_packs in pack(SAMPLES, ranks, budget):
        for packed in rank_packs:
            noise = embedding_noise(settings, step, packed)
            assert noise is not None and noise.alpha == 5.0
            pairs = zip(noise.lengths_S, noise.seeds_S, strict=True)
            by_place |= dict(zip(packed.samples_S.tolist(), pairs, strict=True))
    by_place.pop(-1, None)
    return by_place


def test_packs_and_ranks_change_no_seed() -> None:
    alone = seeds(config(), 3, ranks=1, budget=1000)
    assert [length for _, (length, _) in sorted(alone.items())] == [len(s.tokens) for s in SAMPLES]
    assert seeds(config(), 3, ranks=1, budget=31) == alone
    assert seeds(config(), 3, ranks=4, budget=40) == alone


def test_sequences_steps_and_runs_have_seeds_of_their_own() -> None:
    settings = (config(), config(seed=1))
    every = [
        seed
        for run in settings
        for step in (1, 2, 3)
        for _, seed in seeds(run, step, ranks=1, budget=31).values()
    ]
    assert len(set(every)) == len(every) == 2 * 3 * len(SAMPLES)


def test_no_noise_unless_asked_for() -> None:
    [[packed]] = pack(SAMPLES, 1, 1000)
    assert embedding_noise(config(alpha=None), 1, packed) is None
