"""The objective on responses that are good or bad by themselves: an feedback loss such as KTO's."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.algorithm.choice import feedback_loss
from plimsoll.algorithm.inputs import FeedbackLossInputs, LabelCounts, LossOutput
from plimsoll.algorithm.sequences import sums
from plimsoll.config.base import Choice
from plimsoll.engine.protocol import Engine
from plimsoll.model.attention import sent
from plimsoll.model.policy import PackTensors
from plimsoll.records import BatchCounts, Bools, Floats


@dataclass(frozen=True)
class FeedbackStream:
    """Of each sequence that is no filler, its log-prob under the reference, and its label."""

    reference_logprobs_S: Floats
    desirable_S: Bools


@dataclass(frozen=True)
class FeedbackObjective:
    """The loss with everything but the batch. kl, labels: of the whole step; see
    `FeedbackLossInputs`."""

    feedback_loss: Choice
    kl: float
    labels: LabelCounts

    def loss(
        self, engine: Engine, pack: PackTensors, stream: FeedbackStream, counts: BatchCounts
    ) -> LossOutput:
        logprobs_S = sums(engine.forward(pack)[0], pack.cu_loss_tokens)
        reference_S = sent(stream.reference_logprobs_S, logprobs_S.device)
        logratios_S = logprobs_S[: len(reference_S)] - reference_S  # a filler stands alone
        desirable_S = sent(stream.desirable_S, logprobs_S.device)
        inputs = FeedbackLossInputs(logratios_S, desirable_S, self.kl, self.labels)
        return feedback_loss(self.feedback_loss)(inputs)
