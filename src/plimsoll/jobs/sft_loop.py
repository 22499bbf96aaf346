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
from plimsoll.records import BatchColumns, BatchCounts, Sample
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.readings import Planned
from plimsoll.train.from_data import Work, learn_from_data, work_on_rows
from plimsoll.train.loading import load_roles
from plimsoll.train.measure import measure_likelihood, perplexity, sum_nll
from plimsoll.train.run_data import LoadRows
from plimsoll.train.update import OptimizerStep
from plimsoll.trainer.objectives import NOISE_SEEDS, NllObjective

SftWork = Work[SftConfig, Sample]


def run(spec: RunSpec[SftConfig], planned: Planned) -> None:
    """Train the model. `run.resume` decides whether an earlier run goes on."""
    with work_on_rows(spec, planned, row_loader(spec)) as work:
        load_roles(work)
        learn_from_data(work, partial(learn, work), partial(evaluate, work))


def row_loader(spec: RunSpec[SftConfig]) -> LoadRows[Sample]:
    """Return the function that loads conversations; the config says which tokens are learned."""
    return partial(load_samples, learned=spec.config.algorithm.learned_tokens)


def learn(work: SftWork, batch: Sequence[Sample]) -> OptimizerStep:
    """Return the optimizer step for a batch of conversations."""
    packs = pack(batch, work.cluster.streams, work.spec.workload.budget)
    columns = noise_columns(work.config, work.session.step_under_way, len(batch))
    objective = NllObjective(work.config.algorithm.neftune_alpha)
    return OptimizerStep(packs, BatchCounts.of(batch), objective, columns)


def noise_columns(config: SftConfig, step: int, sequences: int) -> BatchColumns:
    """Return the seeds of the noise on the embeddings of a step; none if the config sets no noise.

    A seed depends only on the run's seed, the step and the sequence's place in the batch. So the
    noise is the same in any pack, on any rank, and in a resumed run.
    """
    if config.algorithm.neftune_alpha is None:
        return {}
    keys = [(config.run.seed, step, place) for place in range(1, sequences + 1)]
    return {NOISE_SEEDS: [np.random.SeedSequence(key).generate_state(1)[0] for key in keys]}


def evaluate(work: SftWork) -> dict[str, float]:
    """Return mean negative log-likelihood (nats) and perplexity of the held-out learned tokens."""
    total = sum_nll(work.spec, work.cluster, work.data.eval)
    mean = total / BatchCounts.of(work.data.eval).tokens
    return {"loss": mean, "perplexity": perplexity(mean)}


def measure(spec: RunSpec[SftConfig], directory: Path) -> dict[str, float]:
    """Return mean negative log-likelihood (nats) and perplexity of the learned tokens, by name."""
    return measure_likelihood(spec, row_loader(spec), "loss")
