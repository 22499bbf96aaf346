"""Supervised fine-tuning: learn the assistant's turns of conversations, or every token of texts.

    plimsoll sft CONFIG.yaml

The loss is the mean negative log-likelihood of the optimizer step's learned tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from plimsoll.data.dataset import load_samples
from plimsoll.data.packing import pack
from plimsoll.jobs.sft import SftConfig
from plimsoll.model.policy import EmbeddingNoise
from plimsoll.records import BatchCounts, Pack, Sample
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.readings import Planned
from plimsoll.train.from_data import Work, learn_from_data, work_on_rows
from plimsoll.train.loading import load_roles
from plimsoll.train.measure import measure_likelihood, perplexity, sum_nll
from plimsoll.train.run_data import LoadRows
from plimsoll.train.update import OptimizerStep
from plimsoll.trainer.objectives import NllObjective

SftWork = Work[SftConfig, Sample]


def run(spec: RunSpec[SftConfig], planned: Planned) -> None:
    """Train the model. `run.resume` decides whether an earlier run goes on."""
    with work_on_rows(spec, planned, row_loader(spec)) as work:
        load_roles(work)
        learn_from_data(work, partial(learn, work), partial(evaluate, work))


def row_loader(spec: RunSpec[SftConfig]) -> LoadRows[Sample]:
    """Return the function that loads conversations; the config says which tokens are learned."""
    return partial(load_samples, learned=spec.config.algorithm.learned_tokens)


def learn(work: SftWork, batch: Sequence[Sample]) -> OptimizerStep[EmbeddingNoise | None]:
    """Return the optimizer step for a batch of conversations."""
    packs = pack(batch, work.cluster.streams, work.spec.workload.budget)
    pack_noise = partial(embedding_noise, work.config, work.session.step_under_way)
    return OptimizerStep(packs, BatchCounts.of(batch), NllObjective(), pack_noise)


def embedding_noise(config: SftConfig, step: int, pack: Pack) -> EmbeddingNoise | None:
    """Return the noise to add to a pack's embeddings in a step; None if the config sets none.

    The noise of a sequence depends only on the run's seed, the step and the sequence's place in the
    batch. So it is the same in any pack, on any rank, and in a resumed run.
    """
    alpha = config.algorithm.neftune_alpha
    if alpha is None:
        return None
    keys = [(config.run.seed, step, int(i) + 1) for i in pack.samples_S]  # a filler's place is -1
    seeds = tuple(int(np.random.SeedSequence(key).generate_state(1)[0]) for key in keys)
    return EmbeddingNoise(alpha, tuple(np.diff(pack.cu_seqlens).tolist()), seeds)


def evaluate(work: SftWork) -> dict[str, float]:
    """Return mean negative log-likelihood (nats) and perplexity of the held-out learned tokens."""
    total = sum_nll(work.spec, work.cluster, work.data.eval)
    mean = total / BatchCounts.of(work.data.eval).tokens
    return {"loss": mean, "perplexity": perplexity(mean)}


def measure(spec: RunSpec[SftConfig], directory: Path) -> dict[str, float]:
    """Return mean negative log-likelihood (nats) and perplexity of the learned tokens, by name."""
    return measure_likelihood(spec, row_loader(spec), "loss")
