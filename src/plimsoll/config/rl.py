"""The config of PPO, with the parts of its reward."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plimsoll.config.algorithm import RlAlgorithm
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.data import DataConfig
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.environment import EnvironmentConfig
from plimsoll.config.reward import RewardConfig, RewardModelConfig
from plimsoll.config.rollout import RolloutConfig, SamplingConfig
from plimsoll.config.run import JobConfig, RlBatch

REWARD_MODEL = "reward_model"
"""The name of a single reward model's part of the reward, in metrics and trajectories."""
ENVIRONMENT = "environment"
"""The name of an environment's part of the reward there."""


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
