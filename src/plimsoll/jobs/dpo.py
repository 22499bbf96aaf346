"""The job of `plimsoll dpo`: DPO and other preference losses. dpo_loop.py runs it."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.base import Choice, NonNegativeFloat, Settings
from plimsoll.config.data import DataConfig
from plimsoll.config.engine import FrozenRole, ReferenceLogprobsConfig, TrainedRole
from plimsoll.config.problems import Problem
from plimsoll.config.run import JobConfig, PreferenceBatch
from plimsoll.jobs.roles import actor, reference
from plimsoll.resolve.choices import is_own, needs_reference
from plimsoll.resolve.columns import pair_source
from plimsoll.resolve.job import (
    PAIR_METRICS,
    Evaluation,
    Job,
    Names,
    both,
    implicit_rewards,
    pairs_of,
)
from plimsoll.resolve.roles import Role
from plimsoll.resolve.rules.training import stored_logprobs, unused_reference


class PreferenceAlgorithm(Settings):
    """Learning from pairs; Rafailov et al. 2023, https://arxiv.org/abs/2305.18290."""

    loss: Choice = Choice(name="dpo", options={"beta": 0.1})
    """The preference loss: a function of algorithm/preference_loss.py, or one's own."""
    nll_weight: NonNegativeFloat = 0.0
    """Weight of the chosen response's mean negative log-likelihood beside the preference loss."""


class DpoConfig(JobConfig):
    """Direct preference optimisation and its family: learning from pairs of responses."""

    data: DataConfig
    """Pairs, template and lengths."""
    batch: PreferenceBatch = PreferenceBatch()
    """What one step sees."""
    actor: TrainedRole
    """The policy."""
    reference: FrozenRole | None = None
    """The frozen policy that the actor is compared with; default: the actor's first weights, which
    with an adapter is the same model with the adapter switched off."""
    reference_logprobs: ReferenceLogprobsConfig = ReferenceLogprobsConfig()
    """When the reference scores the rows, and where its numbers are kept."""
    algorithm: PreferenceAlgorithm = PreferenceAlgorithm()
    """The loss."""


def _roles(config: DpoConfig) -> list[Role]:
    roles = [actor(config.actor, "policy")]
    if needs_reference(config.algorithm.loss):
        precompute = config.reference_logprobs.precompute
        roles.append(reference(config.reference, config.actor, precompute=precompute))
    return roles


def _evaluation(config: DpoConfig) -> Evaluation:
    of_dpo: Names = {"preference_loss": "lowest", "nll": None}
    return Evaluation({**PAIR_METRICS, **of_dpo}, more=is_own(config.algorithm.loss))


def _rules(config: DpoConfig) -> Iterator[Problem]:
    yield from stored_logprobs(config.reference_logprobs)
    if not needs_reference(config.algorithm.loss):
        yield from unused_reference(
            config.reference, config.reference_logprobs, config.algorithm.loss
        )


JOB = Job(
    name="dpo",
    summary="learning from pairs: DPO and its family",
    config=DpoConfig,
    roles=_roles,
    workload=lambda config: pairs_of(config.batch, config.data),
    columns=pair_source,
    streams=True,
    evaluation=_evaluation,
    loop="plimsoll.jobs.dpo_loop",
    choices=lambda config: {"preference_loss": config.algorithm.loss},
    rules=_rules,
    start={"actor.optimizer.learning_rate": 5e-7, "actor.optimizer.schedule": "linear"},
    panels=(
        both("Loss", "per pair", "loss"),
        both("Accuracy", "share of pairs", "accuracy"),
        both("Margin of implicit rewards", "per pair", "rewards/margin"),
        implicit_rewards("chosen", "rejected"),
    ),
)
