"""The job of `plimsoll distill`: distillation. distill_loop.py runs it."""

from __future__ import annotations

from plimsoll.config.base import Choice, PositiveFloat, Probability, Settings
from plimsoll.config.data import DataConfig
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.run import JobConfig, SftBatch
from plimsoll.jobs.roles import actor, teacher
from plimsoll.resolve.columns import sft_source
from plimsoll.resolve.job import Evaluation, Job, both, sequences_of
from plimsoll.resolve.roles import Role


class DistillAlgorithm(Settings):
    """Learning a teacher's distributions; Hinton et al. 2015, https://arxiv.org/abs/1503.02531."""

    divergence: Choice = Choice(name="forward_kl")
    """The divergence of the actor from the teacher: `forward_kl`, `reverse_kl` or `jsd`
    (algorithm/divergence.py), or a function of one's own."""
    temperature: PositiveFloat = 1.0
    """Divides the logits of actor and teacher for the divergence, which is then multiplied by the
    temperature's square, so that its gradient stays as large."""
    nll_share: Probability = 0.0
    """The weight of the data's negative log-likelihood in the loss; the divergence has the rest."""


class DistillConfig(JobConfig):
    """Distillation: learning a larger model's next-token distributions on given conversations."""

    data: DataConfig
    """Rows, template and lengths, as for SFT."""
    batch: SftBatch = SftBatch()
    """What one step sees."""
    actor: TrainedRole
    """The student, which learns."""
    teacher: FrozenRole
    """The model that it learns from; its tokenizer is the student's."""
    algorithm: DistillAlgorithm = DistillAlgorithm()
    """The divergence, and the likelihood beside it."""


def _roles(config: DistillConfig) -> list[Role]:
    return [actor(config.actor, "policy"), teacher(config.teacher, "states")]


JOB = Job(
    name="distill",
    summary="a student learns a teacher's distributions",
    config=DistillConfig,
    roles=_roles,
    workload=lambda config: sequences_of(config.batch, config.data),
    columns=sft_source,
    streams=True,
    evaluation=lambda config: Evaluation(
        {"loss": "lowest", "perplexity": "lowest", "divergence": "lowest", "nll": None}
    ),
    loop="plimsoll.jobs.distill_loop",
    choices=lambda config: {"divergence": config.algorithm.divergence},
    start={"actor.optimizer.learning_rate": 1e-5, "actor.optimizer.schedule": "cosine"},
    panels=(
        both("Loss", "nats per token", "loss"),
        both("Divergence from the teacher", "nats per token", "divergence"),
        both("Negative log-likelihood", "nats per token", "nll"),
    ),
)
