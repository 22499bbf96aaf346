"""Supervised fine-tuning: the mean negative log-likelihood of the learned tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from plimsoll.algorithm.inputs import LossOutput
from plimsoll.engine.protocol import Engine
from plimsoll.model.noise import EmbeddingNoise
from plimsoll.model.policy import PackTensors
from plimsoll.model.token_logprobs import Imitation
from plimsoll.records import BatchCounts


@dataclass(frozen=True)
class NllObjective:
    """It has no settings; its micro-batches carry the noise on their embeddings, or None. Tokens
    are learned at temperature 1, whatever the role samples with."""

    def loss(
        self, engine: Engine, pack: PackTensors, stream: EmbeddingNoise | None, counts: BatchCounts
    ) -> LossOutput:
        loss: Tensor = engine.forward(pack, noise=stream, lesson=Imitation(counts.tokens))
        return LossOutput(loss, {"nll": loss.detach()})
