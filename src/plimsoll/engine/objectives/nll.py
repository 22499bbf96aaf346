"""Supervised fine-tuning: the mean negative log-likelihood of the learned tokens."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.algorithm.inputs import LossOutput
from plimsoll.algorithm.nll import nll
from plimsoll.engine.protocol import Engine
from plimsoll.model.noise import EmbeddingNoise
from plimsoll.model.policy import PackTensors
from plimsoll.records import BatchCounts


@dataclass(frozen=True)
class NllObjective:
    """It has no settings; its micro-batches carry the noise on their embeddings, or None."""

    def loss(
        self, engine: Engine, pack: PackTensors, stream: EmbeddingNoise | None, counts: BatchCounts
    ) -> LossOutput:
        return nll(engine.forward(pack, noise=stream)[0], counts)
