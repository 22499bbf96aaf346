"""The objective on responses that are good or bad by themselves: an unpaired loss such as KTO's."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.algorithm.choice import unpaired_loss
from plimsoll.algorithm.inputs import LabelCounts, LossOutput, UnpairedLossInputs
from plimsoll.algorithm.sequences import sums
from plimsoll.config.base import Choice
from plimsoll.engine.protocol import Engine
from plimsoll.model.attention import sent
from plimsoll.model.policy import PackTensors
from plimsoll.records import BatchCounts, Bools, Floats


@dataclass(frozen=True)
class UnpairedStream:
    """Of each sequence that is no filler, its log-prob under the reference, and its label."""

    reference_logprobs_S: Floats
    desirable_S: Bools


@dataclass(frozen=True)
class UnpairedObjective:
    """The loss with everything but the batch. kl, labels: of the whole step; see
    `UnpairedLossInputs`."""

    unpaired_loss: Choice
    kl: float
    labels: LabelCounts

    def loss(
        self, engine: Engine, pack: PackTensors, stream: UnpairedStream, counts: BatchCounts
    ) -> LossOutput:
        logprobs_S = sums(engine.forward(pack)[0], pack.cu_learned)
        reference_S = sent(stream.reference_logprobs_S, logprobs_S.device)
        logratios_S = logprobs_S[: len(reference_S)] - reference_S  # a filler stands alone
        desirable_S = sent(stream.desirable_S, logprobs_S.device)
        inputs = UnpairedLossInputs(logratios_S, desirable_S, self.kl, self.labels)
        return unpaired_loss(self.unpaired_loss)(inputs)
