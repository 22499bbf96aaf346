"""Supervised fine-tuning: learn the assistant's turns of given conversations, or whole texts.

    plimsoll sft CONFIG.yaml

The loss is the mean negative log-likelihood over the learned tokens of the whole step, so no
split into packs, micro-batches or ranks changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from plimsoll.data.dataset import load_samples
from plimsoll.data.packing import pack
from plimsoll.engine.objectives import NllObjective
from plimsoll.jobs.sft import SftConfig
from plimsoll.model.noise import EmbeddingNoise
from plimsoll.records import BatchCounts, Pack, Sample
from plimsoll.run.readings import Planned
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.from_data import Work, learn_from_data, work_on_rows
from plimsoll.train.loading import load_roles
from plimsoll.train.measure import measure_likelihood, perplexity, summed_nll
from plimsoll.train.run_data import LoadRows
from plimsoll.train.update import Step

SftWork = Work[SftConfig, Sample]


def run(spec: RunSpec[SftConfig], planned: Planned) -> None:
    """Train; resumes where `run.resume` says so."""
    with work_on_rows(spec, planned, loader(spec)) as work:
        load_roles(work)
        learn_from_data(work, partial(learn, work), partial(evaluate, work))


def loader(spec: RunSpec[SftConfig]) -> LoadRows[Sample]:
    """Reads conversations, of which the config says what is learned."""
    return partial(load_samples, learned=spec.config.algorithm.learned_tokens)


def learn(work: SftWork, batch: Sequence[Sample]) -> Step[EmbeddingNoise | None]:
    """What an optimizer step learns of conversations."""
    packs = pack(batch, work.cluster.ranks, work.spec.workload.budget)
    noisy = partial(noise, work.config, work.session.step_under_way)
    return Step(packs, BatchCounts.of(batch), NllObjective(), noisy)


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
    total = summed_nll(work.spec, work.cluster, work.data.eval)
    mean = total / BatchCounts.of(work.data.eval).tokens
    return {"loss": mean, "perplexity": perplexity(mean)}


def measure(spec: RunSpec[SftConfig], directory: Path) -> dict[str, float]:
    """The mean negative log-likelihood (nats) and perplexity of the learned tokens, by the names
    that the evaluation has for them."""
    return measure_likelihood(spec, loader(spec), "loss")
