"""The config of reinforcement learning: its algorithm, and all its parts together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from plimsoll.config.base import (
    Choice,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
)
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.data import DataConfig
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.reward import RewardConfig, RewardModelConfig
from plimsoll.config.rollout import EnvironmentConfig, RolloutConfig, SamplingConfig
from plimsoll.config.run import JobConfig, RlBatch

PACKAGE = "plimsoll.algorithm"
"""The package of the functions that `algorithm` chooses by name."""
FUNCTIONS = {
    "policy_loss": "algorithm.policy_loss",
    "preference_loss": "algorithm.loss",
    "reward_loss": "algorithm.loss",
    "feedback_loss": "algorithm.loss",
    "advantage": "algorithm.advantage",
    "correction": "algorithm.correction",
    "divergence": "algorithm.divergence",
}
"""The files of algorithm/ with functions that a config names, and the key that names one."""


class AdaptiveKlConfig(Settings):
    """A coefficient that moves towards a KL; Ziegler et al. 2019, arXiv 1909.08593, section 2.2."""

    target: PositiveFloat
    """The KL to reach, in nats."""
    per: Literal["response", "token"] = "response"
    """The unit of the target. response: the sum over the tokens of a response, as in the paper;
    token: the mean over responses of the mean over their tokens, as in OpenRLHF and verl."""
    horizon: PositiveInt = 10_000
    """Responses over which the coefficient moves."""


class KlConfig(Settings):
    """The KL divergence from the reference: estimator, place, coefficient."""

    place: Literal["reward", "loss"] = "reward"
    """reward: subtracted token by token from the reward; loss: added to the policy loss."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimators of KL(policy || reference); http://joschu.net/blog/kl-approx.html."""
    coefficient: NonNegativeFloat = 0.01
    """The weight of the KL; the first weight, if it is adaptive."""
    adaptive: AdaptiveKlConfig | None = None
    """Adapt the coefficient; default: it stays."""
    ratio_corrected: bool = False
    """In the loss: multiply each token's KL by its importance ratio w. Its gradient is then
    the KL's, w (log policy - log reference), with every estimator and in every update of a step."""


def _none(value: object) -> object:
    """Return None for the word "none"."""
    return None if value == "none" else value


class RlAlgorithm(Settings):
    """The advantage that is made of rewards, and how the policy learns from it.

    The defaults are those of proximal policy optimisation; Schulman et al. 2017,
    https://arxiv.org/abs/1707.06347.
    """

    advantage: Choice = Choice(name="gae", options={"gamma": 1.0, "gae_lambda": 0.95})
    """The advantage estimator: a function of algorithm/advantage.py, or a function of one's own."""
    policy_loss: Choice = Choice(name="clip")
    """The policy loss: a function of algorithm/policy_loss.py, or a function of one's own."""
    aggregation: Literal["tokens", "sequences", "constant"] = "tokens"
    """tokens: the mean of all learned tokens of an optimizer step; sequences: the mean of the
    sequences' means; constant: the sum, divided by aggregation_tokens times the number of
    sequences."""
    aggregation_tokens: PositiveInt | None = None
    """The divisor of `aggregation: constant`; default: the most tokens that a response
    may have."""
    correction: Choice | None = Choice(name="truncate", options={"level": "token", "high": 2.0})
    """Weights against the difference between sampler and trainer: a function of
    algorithm/correction.py, or one's own; null: none."""
    value_clip: PositiveFloat | None = 0.2
    """Clip the change of the value by this much; null turns value clipping off."""
    kl: Annotated[KlConfig | None, BeforeValidator(_none)] = KlConfig()
    """The KL from the reference; none: no reference is loaded at all."""
    mask_truncated: bool = False
    """Learn nothing from responses that were cut off at their longest, as in DAPO
    (arXiv 2503.14476, section 3.4). Their rewards still count in the advantages of others."""
    distill_weight: PositiveFloat = 1.0
    """With a `teacher`: the weight of the divergence from it, beside the rewards' advantage."""
    distill_divergence: Choice | None = None
    """With a `teacher`: a divergence over the whole vocabulary (`reverse_kl`, `forward_kl`, `jsd`,
    or a function of one's own), which replaces the policy loss; null: reverse KL by policy
    gradient: each sampled token's advantage gets the teacher's log-prob less the actor's."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of the mean token entropy that is added to the objective."""
    epochs: PositiveInt = 1
    """Passes over each batch of trajectories."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per pass; must divide the number of trajectories of a step."""
    critic_mini_batches: PositiveInt | None = None
    """The same for the critic; default: as many as `mini_batches`."""
    critic_warmup_steps: NonNegativeInt = 0
    """Steps at the beginning that train the critic alone; the actor's schedule and an adaptive KL
    coefficient begin after them."""


REWARD_MODEL = "reward_model"
"""The name of a single reward model's part of the reward, in metrics and trajectories."""
ENVIRONMENT = "environment"
"""The name of an environment's part of the reward there."""


def scoring_key(part: str) -> str:
    """Return the key of the reward model that gives a part of the reward."""
    return part if part == REWARD_MODEL else f"reward_models.{part}"


class RlConfig(JobConfig):
    """Reinforcement learning from sampled responses and their rewards."""

    preset: str | None = None
    """Values that those of this file override: a preset's name, or a YAML file of one's own."""

    variant: Literal["paper"] | None = None
    """paper: the preset's values as the method's paper has them; default: as most train it today.
    `plimsoll PRESET --help` lists the differences."""

    cluster: ClusterConfig = ClusterConfig()
    """Where the roles live."""
    data: DataConfig
    """Prompts with reference answers."""
    batch: RlBatch = RlBatch()
    """What one step sees."""
    actor: TrainedRole
    """The policy."""
    critic: TrainedRole | None = None
    """The value function, for an advantage that takes values; it starts from its own model, with a
    new value head."""
    reference: FrozenRole | None = None
    """The frozen policy that the KL is measured from; default: the actor's first weights."""
    teacher: FrozenRole | None = None
    """A model of the actor's family that scores what the actor samples: on-policy distillation."""
    rewards: dict[str, RewardConfig] = Field(default={})
    """The parts of the reward, by the name they are shown under; may be left out beside a
    reward_model or a teacher."""
    reward_model: RewardModelConfig | None = None
    """A trained reward model, as a further part of the reward."""
    reward_models: dict[str, RewardModelConfig] = Field(default={})
    """Several reward models, by the names that their parts of the reward are shown under."""
    environments: dict[str, EnvironmentConfig] = Field(default={})
    """Environments that answer what is sampled, so that an episode has several turns; by name. If
    there are several, each row names its own (`environment` of its source). Their rewards come as
    the part `environment`, before `rewards`."""
    rollout: RolloutConfig = RolloutConfig()
    """The engines that sample."""
    eval_sampling: SamplingConfig | None = None
    """How held-out prompts are answered; default: as in training."""
    algorithm: RlAlgorithm = RlAlgorithm()
    """Advantage, losses, KL."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all parts of the reward, in their order."""
        environment = (ENVIRONMENT,) if self.environments else ()
        return (*environment, *self.rewards, *self.scoring_models)

    @property
    def is_rewarded(self) -> bool:
        """Whether a reward counts: rewards of weight 0 are figures alone."""
        weights = [part.weight for part in self.rewards.values()]
        weights += [model.weight for model in self.scoring_models.values()]
        return any(weights) or bool(self.environments)

    @property
    def scoring_models(self) -> dict[str, RewardModelConfig]:
        """All reward models, by the names of their parts of the reward."""
        unnamed = {} if self.reward_model is None else {REWARD_MODEL: self.reward_model}
        return unnamed | self.reward_models
