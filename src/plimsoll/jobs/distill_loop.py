"""Distillation: a student learns a teacher's next-token distributions on given conversations.

    plimsoll distill CONFIG.yaml

Hinton et al. 2015, https://arxiv.org/abs/1503.02531. In each step the teacher reads the step's
rows. The student then takes an optimizer step on its divergence from the teacher and, if the config
says so, on the negative log-likelihood of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from plimsoll.algorithm.choice import divergence
from plimsoll.data.dataset import load_samples
from plimsoll.data.packing import pack
from plimsoll.jobs.distill import DistillConfig
from plimsoll.jobs.roles import TEACHER
from plimsoll.records import BatchCounts, Sample
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.readings import Planned
from plimsoll.train.from_data import Work, learn_from_data, work_on_rows
from plimsoll.train.loading import load_roles
from plimsoll.train.measure import measure_likelihood, perplexity
from plimsoll.train.update import OptimizerStep, teach
from plimsoll.trainer.objectives import DistillationObjective
from plimsoll.trainer.worker import Worker

DistillWork = Work[DistillConfig, Sample]


def run(spec: RunSpec[DistillConfig], planned: Planned) -> None:
    """Train the student. `run.resume` decides whether an earlier run goes on."""
    divergence(spec.config.algorithm.divergence)  # a wrong name or option ends the run right here
    with work_on_rows(spec, planned, load_samples) as work:
        load_roles(work)
        learn_from_data(work, partial(learn, work), partial(evaluate, work))


def learn(work: DistillWork, batch: Sequence[Sample]) -> OptimizerStep:
    """Run the teacher on a batch; return the optimizer step that the student takes on it."""
    full = pack(batch, work.cluster.streams, work.spec.workload.budget)
    packs = work.cluster.shortages.split(work.spec.sender.name, full, unit=1)
    with work.session.phase("score", work.cluster):
        teach(TEACHER, packs, work.cluster)
    return OptimizerStep(packs, BatchCounts.of(batch), objective(work.config), TEACHER)


def evaluate(work: DistillWork) -> dict[str, float]:
    """Return loss, divergence, negative log-likelihood and perplexity on the held-out rows.

    Rows are read in groups as large as a step, because the teacher's states are kept in memory.
    """
    cluster, batch = work.cluster, work.config.batch
    counts, goal = BatchCounts.of(work.data.eval), objective(work.config)
    student, totals = work.spec.sender.name, dict[str, float]()
    for start in range(0, len(work.data.eval), batch.sequences):
        rows = work.data.eval[start : start + batch.sequences]
        packs = pack(rows, cluster.streams, work.spec.workload.budget)
        teach(TEACHER, packs, cluster)
        arguments = [(student, rank_packs, counts, goal) for rank_packs in packs]
        for shares in cluster.call(Worker.measure_distillation, arguments).result():
            totals = {name: totals.get(name, 0.0) + share for name, share in shares.items()}
    return totals | {"perplexity": perplexity(totals["nll"])}


def objective(config: DistillConfig) -> DistillationObjective:
    """Return the student's objective, as the config sets it."""
    algorithm = config.algorithm
    return DistillationObjective(algorithm.divergence, algorithm.temperature, algorithm.nll_share)


def measure(spec: RunSpec[DistillConfig], directory: Path) -> dict[str, float]:
    """Return mean negative log-likelihood (nats) and perplexity of the learned tokens, by name."""
    return measure_likelihood(spec, load_samples, "nll")
