"""The whole config of each job; agree.py has what must agree within it."""

from __future__ import annotations

from pydantic import Field

from plimsoll.config.algorithm import (
    DistillAlgorithm,
    KtoAlgorithm,
    PpoAlgorithm,
    PreferenceAlgorithm,
    RewardAlgorithm,
    SftAlgorithm,
)
from plimsoll.config.base import Settings
from plimsoll.config.batch import KtoBatch, PpoBatch, PreferenceBatch, SftBatch
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.data import DataConfig
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.reference_logprobs import ReferenceLogprobsConfig
from plimsoll.config.reward import RewardConfig, RewardModelConfig
from plimsoll.config.rollout import RolloutConfig, SamplingConfig
from plimsoll.config.run import RunConfig


class SftConfig(Settings):
    """Supervised fine-tuning."""

    run: RunConfig
    """The run directory, the length of the run, saving and evaluation."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the ranks live."""
    data: DataConfig
    """Rows, template and lengths."""
    batch: SftBatch = SftBatch()
    """What one step sees."""
    actor: TrainedRole
    """The model that learns."""
    algorithm: SftAlgorithm = SftAlgorithm()
    """What is learned, and the noise."""


class DistillConfig(Settings):
    """Distillation: learning a larger model's next-token distributions on given conversations."""

    run: RunConfig
    """The run directory, the length of the run, saving and evaluation."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the ranks live."""
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


class DpoConfig(Settings):
    """Direct preference optimisation and its family: learning from pairs of responses."""

    run: RunConfig
    """The run directory, the length of the run, saving and evaluation."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the ranks live."""
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


class KtoConfig(Settings):
    """Kahneman-Tversky optimisation: learning from single responses that are good or bad."""

    run: RunConfig
    """The run directory, the length of the run, saving and evaluation."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the ranks live."""
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


class RmConfig(Settings):
    """Reward model: learning from pairs to score a whole response."""

    run: RunConfig
    """The run directory, the length of the run, saving and evaluation."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the ranks live."""
    data: DataConfig
    """Pairs, template and lengths."""
    batch: PreferenceBatch = PreferenceBatch()
    """What one step sees."""
    actor: TrainedRole
    """The model that learns; it starts with a new score head, or with its own, if it has one."""
    algorithm: RewardAlgorithm = RewardAlgorithm()
    """The loss."""


class PrmConfig(Settings):
    """Process reward model: learning from labelled steps to score each step of a response."""

    run: RunConfig
    """The run directory, the length of the run, saving and evaluation."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the ranks live."""
    data: DataConfig
    """Prompts, steps and labels, template and lengths."""
    batch: SftBatch = SftBatch()
    """What one step sees."""
    actor: TrainedRole
    """The model that learns; it starts with a new score head, or with its own, if it has one."""


class PpoConfig(Settings):
    """Proximal policy optimisation with actor, critic, reference and rewards."""

    run: RunConfig
    """The run directory, the length of the run, saving and evaluation."""
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


SequenceJobConfig = SftConfig | DistillConfig | KtoConfig | PrmConfig
"""The jobs that learn from a fixed data set of single sequences."""
PairJobConfig = DpoConfig | RmConfig
"""The jobs that learn from a fixed data set of pairs."""
DataJobConfig = SequenceJobConfig | PairJobConfig
"""The jobs that learn from a fixed data set."""
ComparedJobConfig = DpoConfig | KtoConfig
"""Those of them that compare the actor with a reference."""
RlJobConfig = PpoConfig
"""The jobs that learn from what they sample."""
JobConfig = DataJobConfig | RlJobConfig
