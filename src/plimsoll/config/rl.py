"""The config of PPO, and what a response is worth."""

from __future__ import annotations

from pydantic import Field

from plimsoll.config.algorithm import PpoAlgorithm
from plimsoll.config.base import Choice, Settings
from plimsoll.config.batch import PpoBatch
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.data import DataConfig
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.job import JobConfig
from plimsoll.config.rollout import RolloutConfig, SamplingConfig


class RewardConfig(Choice):
    """One part of the reward: a rule of Plimsoll's (`math_answer`, `pattern`, ...) or a Python
    function by import path, with its weight."""

    weight: float = 1.0
    """The part's weight in the sum."""


class RewardModelConfig(Settings):
    """A trained reward model that scores whole responses: a sequence classifier with one label and
    the actor's tokenizer."""

    role: FrozenRole
    """The model, and how it is kept."""
    weight: float = 1.0
    """The score's weight in the sum."""


class PpoConfig(JobConfig):
    """Proximal policy optimisation with actor, critic, reference and rewards."""

    cluster: ClusterConfig = ClusterConfig()
    """Where the roles live."""
    data: DataConfig
    """Prompts with reference answers."""
    batch: PpoBatch = PpoBatch()
    """What one step sees."""
    actor: TrainedRole
    """The policy."""
    critic: TrainedRole
    """The value function; starts from its own model, with a new value head."""
    reference: FrozenRole | None = None
    """The frozen policy that the KL is measured from; default: the actor's first weights."""
    rewards: dict[str, RewardConfig] = Field(default={})
    """The parts of the reward, by the name they are shown under; may be left out beside a
    reward_model."""
    reward_model: RewardModelConfig | None = None
    """A trained reward model, as a further part of the reward."""
    rollout: RolloutConfig = RolloutConfig()
    """The engines that sample."""
    eval_sampling: SamplingConfig | None = None
    """How held-out prompts are answered; default: as in training."""
    algorithm: PpoAlgorithm = PpoAlgorithm()
    """Advantage, losses, KL."""
