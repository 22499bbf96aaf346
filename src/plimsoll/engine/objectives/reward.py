"""The objective of a reward model on pairs: a reward loss, and the centring of the scores."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.algorithm.choice import reward_loss
from plimsoll.algorithm.inputs import LossOutput, RewardLossInputs
from plimsoll.algorithm.preference import in_pairs, reward_objective
from plimsoll.config.base import Choice
from plimsoll.engine.protocol import Engine
from plimsoll.model.attention import sent
from plimsoll.model.policy import PackTensors
from plimsoll.model.value import at_ends
from plimsoll.records import BatchCounts, Floats


@dataclass(frozen=True)
class RewardObjective:
    """The loss on packs of pairs (see `pack_pairs`), whose samples end where they are scored. With
    a pack goes by how much each pair's chosen score should be ahead; 0 where nothing is said."""

    reward_loss: Choice
    centring: float

    def loss(
        self, engine: Engine, pack: PackTensors, stream: Floats, counts: BatchCounts
    ) -> LossOutput:
        scores = in_pairs(engine.forward(at_ends(pack)))
        margins_P = sent(stream, scores.chosen_P.device)
        inputs = RewardLossInputs(scores, margins_P, counts.sequences // 2)
        return reward_objective(inputs, reward_loss(self.reward_loss), self.centring)
