"""The job of `plimsoll sft`: supervised fine-tuning. sft_loop.py runs it."""

from __future__ import annotations

from plimsoll.config.base import PositiveFloat, Settings
from plimsoll.config.data import DataConfig, LearnedTokens
from plimsoll.config.engine import TrainedRole
from plimsoll.config.run import JobConfig, SftBatch
from plimsoll.jobs.roles import actor
from plimsoll.resolve.columns import sft_source
from plimsoll.resolve.job import Evaluation, Job, both, sequences_of


class SftAlgorithm(Settings):
    """Supervised fine-tuning."""

    learned_tokens: LearnedTokens = "assistant"
    """assistant: what the assistant says, with the token that ends each turn; all: every token of
    a conversation, the template's own too. Documents of plain text are always learned whole."""
    neftune_alpha: PositiveFloat | None = None
    """Noise on the input embeddings while training, uniform within alpha / sqrt(length * width)
    (NEFTune, Jain et al. 2023, https://arxiv.org/abs/2310.05914: 5, 10 or 15); default: none."""


class SftConfig(JobConfig):
    """Supervised fine-tuning."""

    data: DataConfig
    """Rows, template and lengths."""
    batch: SftBatch = SftBatch()
    """What one step sees."""
    actor: TrainedRole
    """The model that learns."""
    algorithm: SftAlgorithm = SftAlgorithm()
    """What is learned, and the noise."""


JOB = Job(
    name="sft",
    summary="supervised fine-tuning",
    config=SftConfig,
    roles=lambda config: [actor(config.actor, "policy")],
    workload=lambda config: sequences_of(config.batch, config.data),
    columns=sft_source,
    streams=True,
    evaluation=lambda config: Evaluation({"loss": "lowest", "perplexity": "lowest"}),
    loop="plimsoll.jobs.sft_loop",
    rows=lambda config: {"learned": config.algorithm.learned_tokens},
    start={"actor.optimizer.learning_rate": 1e-5, "actor.optimizer.schedule": "cosine"},
    panels=(both("Loss", "nats per token", "loss"),),
)
