"""The job of `plimsoll prm`: process reward models. prm_loop.py runs it."""

from __future__ import annotations

from plimsoll.config.data import DataConfig
from plimsoll.config.engine import TrainedRole
from plimsoll.config.run import JobConfig, SftBatch
from plimsoll.jobs.roles import actor
from plimsoll.resolve.columns import step_source
from plimsoll.resolve.job import Evaluation, Job, Names, both, sequences_of, with_interval


class PrmConfig(JobConfig):
    """Process reward model: learning from labelled steps to score each step of a response."""

    data: DataConfig
    """Prompts, steps and labels, template and lengths."""
    batch: SftBatch = SftBatch()
    """What one step sees."""
    actor: TrainedRole
    """The model that learns. It keeps its score head if it has one; else the head is new."""


_METRICS: Names = {
    "loss": "lowest",
    "accuracy": "highest",
    "labels": None,
    "calibration_error": "lowest",
    **with_interval("solution_accuracy", "highest"),
    "right_solutions": None,
}


JOB = Job(
    name="prm",
    summary="a process reward model, from labelled steps",
    config=PrmConfig,
    roles=lambda config: [actor(config.actor, "value")],
    workload=lambda config: sequences_of(config.batch, config.data),
    columns=step_source,
    evaluation=lambda config: Evaluation(_METRICS),
    loop="plimsoll.jobs.prm_loop",
    has_steps=True,
    start={"actor.optimizer.learning_rate": 1e-6, "actor.optimizer.schedule": "cosine"},
    panels=(
        both("Loss", "nats per labelled step", "loss"),
        both("Accuracy on steps", "share of labelled steps", "accuracy"),
        both("Whole solutions", "share judged right", "solution_accuracy"),
    ),
)
