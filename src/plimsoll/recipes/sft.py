"""Supervised fine-tuning: learn the assistant's turns of given conversations, or whole texts.

    plimsoll sft CONFIG.yaml

The loss is the mean negative log-likelihood over the learned tokens of the whole step, so no
split into packs, micro-batches or ranks changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from plimsoll.algorithm.perplexity import perplexity
from plimsoll.config.jobs import SftConfig
from plimsoll.data.dataset import load_samples
from plimsoll.data.packing import pack
from plimsoll.engine.objectives.nll import NllObjective
from plimsoll.engine.worker import StepResult, Worker
from plimsoll.memory.price.work import largest_pack
from plimsoll.model.noise import EmbeddingNoise
from plimsoll.recipes.from_data import Work, learn_from_data, open_work
from plimsoll.recipes.roles import load_actor
from plimsoll.recipes.update import update
from plimsoll.records import BatchCounts, Pack, Sample

SftWork = Work[SftConfig, Sample]


def run_sft(config: SftConfig) -> None:
    """Run the job that the config describes; resumes where `run.resume` says so."""
    load = partial(load_samples, learned=config.algorithm.learned_tokens)
    with open_work("sft", config, load) as work:
        load_actor(work)
        learn_from_data(
            work,
            config.batch.sequences,
            lambda sample: len(sample.tokens),
            partial(learn, work),
            partial(evaluate, work),
        )


def learn(work: SftWork, batch: Sequence[Sample], rate: float) -> list[StepResult]:
    """One optimizer step on all ranks."""
    packs = pack(batch, work.cluster.ranks, work.config.batch.micro_batch_tokens)
    counts = BatchCounts.of(batch)
    step = work.session.step_under_way
    streams = [[noise(work.config, step, pack) for pack in own] for own in packs]
    with work.session.phase("train_actor", work.cluster):
        return update("actor", work.cluster, packs, streams, counts, NllObjective(), rate)


def noise(config: SftConfig, step: int, pack: Pack) -> EmbeddingNoise | None:
    """The noise on a pack's embeddings in a step: of each sequence from the run's seed, the step
    and its place in the batch, so that it is the same in any pack, on any rank, and after a resume.
    """
    alpha = config.algorithm.neftune_alpha
    if alpha is None:
        return None
    keys = [(config.run.seed, step, int(i) + 1) for i in pack.samples_S]  # a filler's place is -1
    seeds = tuple(int(np.random.SeedSequence(key).generate_state(1)[0]) for key in keys)
    return EmbeddingNoise(alpha, tuple(np.diff(pack.cu_seqlens).tolist()), seeds)


def evaluate(work: SftWork) -> dict[str, float]:
    """Mean negative log-likelihood (nats) and perplexity per learned token of the held-out rows."""
    ranks = work.cluster.ranks
    packs = pack(work.eval, ranks, largest_pack(work.config, ranks))
    total = sum(work.cluster.each(Worker.nll, [("actor", own) for own in packs]))
    mean = total / sum(int(sample.learned.sum()) for sample in work.eval)
    return {"loss": mean, "perplexity": perplexity(mean)}
