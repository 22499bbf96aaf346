"""The objective of a process reward model: whether each step of a response is right."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.algorithm.inputs import LossOutput
from plimsoll.algorithm.process_reward import process_loss
from plimsoll.engine.objectives.objective import as_tensor
from plimsoll.engine.protocol import Engine
from plimsoll.model.policy import PackTensors
from plimsoll.model.value import at_marks
from plimsoll.records import BatchCounts, Floats


@dataclass(frozen=True)
class ProcessStream:
    """labels_L: of each step, in packed order."""

    labels_L: Floats


@dataclass(frozen=True)
class ProcessObjective:
    """It has no settings. The learned tokens of its packs are the steps' last ones."""

    def loss(
        self, engine: Engine, pack: PackTensors, stream: ProcessStream, counts: BatchCounts
    ) -> LossOutput:
        scores_L = engine.forward(at_marks(pack))
        return process_loss(scores_L, as_tensor(stream.labels_L, scores_L), counts)
