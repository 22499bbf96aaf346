"""The job of `plimsoll rm`: reward models. rm_loop.py runs it."""

from __future__ import annotations

from functools import partial

from plimsoll.config.base import Choice, NonNegativeFloat, Settings
from plimsoll.config.data import DataConfig
from plimsoll.config.engine import TrainedRole
from plimsoll.config.run import JobConfig, PreferenceBatch
from plimsoll.jobs.roles import actor
from plimsoll.resolve.choices import is_own
from plimsoll.resolve.columns import pair_source
from plimsoll.resolve.job import PAIR_METRICS, Evaluation, Job, Names, both, pairs_of


class RewardAlgorithm(Settings):
    """Learning scores from pairs; Ouyang et al. 2022, https://arxiv.org/abs/2203.02155."""

    loss: Choice = Choice(name="log_sigmoid")
    """The reward loss: a function of algorithm/reward_loss.py, or a function of one's own."""
    centring: NonNegativeFloat = 0.0
    """Weight of a loss term that draws scores to 0: the mean square of the sum of a pair's scores;
    such as 0.01, Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244."""


class RmConfig(JobConfig):
    """Reward model: learning from pairs to score a whole response."""

    data: DataConfig
    """Pairs, template and lengths."""
    batch: PreferenceBatch = PreferenceBatch()
    """What one step sees."""
    actor: TrainedRole
    """The model that learns. It keeps its score head if it has one; else the head is new."""
    algorithm: RewardAlgorithm = RewardAlgorithm()
    """The loss."""


def _evaluation(config: RmConfig) -> Evaluation:
    of_rm: Names = {"reward_loss": "lowest", "off_centre": "lowest", "calibration_error": "lowest"}
    return Evaluation({**PAIR_METRICS, **of_rm}, more=is_own(config.algorithm.loss))


JOB = Job(
    name="rm",
    summary="a reward model, from pairs",
    config=RmConfig,
    roles=lambda config: [actor(config.actor, "value")],
    workload=lambda config: pairs_of(config.batch, config.data, ends_only=True),
    columns=partial(pair_source, margin=True),
    evaluation=_evaluation,
    loop="plimsoll.jobs.rm_loop",
    choices=lambda config: {"reward_loss": config.algorithm.loss},
    start={"actor.optimizer.learning_rate": 1e-5, "actor.optimizer.schedule": "linear"},
    panels=(
        both("Loss", "per pair", "loss"),
        both("Accuracy", "share of pairs", "accuracy"),
        both("Margin of scores", "per pair", "rewards/margin"),
    ),
)
