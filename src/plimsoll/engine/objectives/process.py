"""The objective of a process reward model: whether each step of a response is right."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.algorithm.inputs import LossOutput
from plimsoll.algorithm.process_reward import process_loss
from plimsoll.engine.protocol import Engine
from plimsoll.model.attention import sent
from plimsoll.model.policy import PackTensors
from plimsoll.model.value import at_marks
from plimsoll.records import BatchCounts, Floats


@dataclass(frozen=True)
class ProcessObjective:
    """It has no settings. The learned tokens of its packs are the steps' last ones; with a pack go
    its steps' labels, in packed order."""

    def loss(
        self, engine: Engine, pack: PackTensors, stream: Floats, counts: BatchCounts
    ) -> LossOutput:
        scores_L = engine.forward(at_marks(pack))
        return process_loss(scores_L, sent(stream, scores_L.device), counts)
