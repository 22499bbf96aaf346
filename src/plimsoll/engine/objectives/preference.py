"""The objective on pairs: a preference loss, and the chosen response's likelihood beside it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from plimsoll.algorithm.choice import preference_loss
from plimsoll.algorithm.inputs import LossOutput, PairValues, PreferenceLossInputs
from plimsoll.algorithm.preference import in_pairs, preference_objective
from plimsoll.algorithm.sequences import lengths, sums
from plimsoll.config.base import Choice
from plimsoll.engine.objectives.objective import as_tensor
from plimsoll.engine.protocol import Engine
from plimsoll.model.policy import PackTensors
from plimsoll.records import BatchCounts, Floats


@dataclass(frozen=True)
class PreferenceStream:
    """reference_logprobs_S: each sequence's log-prob under the reference; None for a reference-free
    loss."""

    reference_logprobs_S: Floats | None


@dataclass(frozen=True)
class PreferenceObjective:
    """The loss on packs of pairs (see `pack_pairs`) with everything but the batch."""

    preference_loss: Choice
    nll_weight: float

    def loss(
        self, engine: Engine, pack: PackTensors, stream: PreferenceStream, counts: BatchCounts
    ) -> LossOutput:
        logprobs_L, _ = engine.forward(pack)
        return preference_objective(
            _inputs(logprobs_L, pack.cu_learned, counts.sequences // 2),
            _reference(stream, logprobs_L),
            preference_loss(self.preference_loss).compute,
            self.nll_weight,
        )


def _inputs(logprobs_L: Tensor, cu_learned: Tensor, pairs: int) -> PreferenceLossInputs:
    return PreferenceLossInputs(
        logprobs=in_pairs(sums(logprobs_L, cu_learned)),
        lengths=in_pairs(lengths(cu_learned).float()),
        pairs=pairs,
    )


def _reference(stream: PreferenceStream, like: Tensor) -> PairValues | None:
    if stream.reference_logprobs_S is None:
        return None
    return in_pairs(as_tensor(stream.reference_logprobs_S, like))
