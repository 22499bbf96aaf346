"""The objective on pairs: a preference loss, and the chosen response's likelihood beside it."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.algorithm.choice import preference_loss
from plimsoll.algorithm.inputs import LossOutput, PreferenceLossInputs
from plimsoll.algorithm.preference import in_pairs, preference_objective
from plimsoll.algorithm.sequences import lengths, sums
from plimsoll.config.base import Choice
from plimsoll.engine.protocol import Engine
from plimsoll.model.attention import sent
from plimsoll.model.policy import PackTensors
from plimsoll.records import BatchCounts, Floats


@dataclass(frozen=True)
class PreferenceObjective:
    """The loss on packs of pairs (see `pack_pairs`) with everything but the batch. With a pack goes
    each sequence's log-prob under the reference; None for a reference-free loss."""

    preference_loss: Choice
    nll_weight: float

    def loss(
        self, engine: Engine, pack: PackTensors, stream: Floats | None, counts: BatchCounts
    ) -> LossOutput:
        logprobs_L, _ = engine.forward(pack)
        inputs = PreferenceLossInputs(
            logprobs=in_pairs(sums(logprobs_L, pack.cu_loss_tokens)),
            lengths=in_pairs(lengths(pack.cu_loss_tokens).float()),
            pairs=counts.sequences // 2,
        )
        return preference_objective(
            inputs,
            None if stream is None else in_pairs(sent(stream, logprobs_L.device)),
            preference_loss(self.preference_loss).compute,
            self.nll_weight,
        )
