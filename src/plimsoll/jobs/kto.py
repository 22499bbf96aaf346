"""The job of `plimsoll kto`: KTO. kto_loop.py runs it."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.config.base import Choice, Settings
from plimsoll.config.data import DataConfig
from plimsoll.config.engine import FrozenRole, ReferenceLogprobsConfig, TrainedRole
from plimsoll.config.run import JobConfig, KtoBatch
from plimsoll.jobs.roles import actor, reference
from plimsoll.resolve.choices import is_own
from plimsoll.resolve.columns import labelled_source
from plimsoll.resolve.job import (
    ACCURACY,
    Evaluation,
    Job,
    Names,
    both,
    implicit_rewards,
    sequences_of,
)
from plimsoll.resolve.roles import Role
from plimsoll.resolve.rules.training import stored_logprobs


class KtoAlgorithm(Settings):
    """Learning from labelled responses; Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306."""

    loss: Choice = Choice(name="kto", options={"beta": 0.1})
    """The loss: a function of algorithm/feedback_loss.py, or a function of one's own."""


class KtoConfig(JobConfig):
    """Kahneman-Tversky optimisation: learning from single responses that are good or bad."""

    data: DataConfig
    """Labelled responses or pairs, template and lengths."""
    batch: KtoBatch = KtoBatch()
    """What one step sees."""
    actor: TrainedRole
    """The policy."""
    reference: FrozenRole | None = None
    """The frozen policy that the actor is compared with; default: the actor's first weights, which
    with an adapter is the same model with the adapter switched off."""
    reference_logprobs: ReferenceLogprobsConfig = ReferenceLogprobsConfig()
    """When the reference scores the rows, and where its numbers are kept."""
    algorithm: KtoAlgorithm = KtoAlgorithm()
    """The loss."""


def _roles(config: KtoConfig) -> list[Role]:
    precompute = config.reference_logprobs.precompute
    return [
        actor(config.actor, "policy", scores=True),
        reference(config.reference, config.actor, precompute=precompute),
    ]


def _evaluation(config: KtoConfig) -> Evaluation:
    metrics: Names = {
        "loss": "lowest",
        **ACCURACY,
        "rewards/margin": "highest",
        "rewards/desirable": None,
        "rewards/undesirable": None,
        "kl": None,
    }
    return Evaluation(metrics, more=is_own(config.algorithm.loss))


JOB = Job(
    name="kto",
    summary="learning from responses labelled good or bad",
    config=KtoConfig,
    roles=_roles,
    workload=lambda config: replace(sequences_of(config.batch, config.data), scored_with=2),
    columns=labelled_source,
    evaluation=_evaluation,
    loop="plimsoll.jobs.kto_loop",
    choices=lambda config: {"feedback_loss": config.algorithm.loss},
    rules=lambda config: stored_logprobs(config.reference_logprobs),
    start={"actor.optimizer.learning_rate": 1e-6, "actor.optimizer.schedule": "linear"},
    panels=(
        both("Loss", "per response", "loss"),
        both("Accuracy", "share of pairings", "accuracy"),
        both("Margin of implicit rewards", "per response", "rewards/margin"),
        implicit_rewards("desirable", "undesirable"),
        both("KL from the reference", "nats per response", "kl"),
    ),
)
