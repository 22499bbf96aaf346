"""The objectives that roles learn: a forward of one micro-batch, and its share of the loss.

Functions beside them do so for a rank's micro-batches, one after another: they compute scores, or
losses and gradients.

An objective is a frozen dataclass that is sent to the ranks with every optimizer step. One stream
goes with it for each micro-batch: the micro-batch's data besides its tokens. `Worker.train` accepts
any object with the method `loss` of `protocol.Objective`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from plimsoll.algorithm.choice import (
    correction,
    divergence,
    feedback_loss,
    policy_loss,
    preference_loss,
    reward_loss,
)
from plimsoll.algorithm.inputs import (
    CorrectionInputs,
    FeedbackLossInputs,
    LabelCounts,
    LossOutput,
    PolicyLossInputs,
    PreferenceLossInputs,
    RewardLossInputs,
    TokenLoss,
    TokenWeights,
)
from plimsoll.algorithm.policy_objective import (
    PolicyObjectiveInputs,
    PolicyTerms,
    policy_objective,
)
from plimsoll.algorithm.preference import in_pairs, preference_objective, reward_objective
from plimsoll.algorithm.sequences import sums
from plimsoll.algorithm.token_losses import process_loss, value_loss
from plimsoll.config.base import Choice
from plimsoll.machine.faults import fault_point, fault_value
from plimsoll.model.distillation import Distilled, Lesson
from plimsoll.model.policy import EmbeddingNoise, PackTensors, TeacherModel, at_ends, at_marks
from plimsoll.model.sending import keep_on_host
from plimsoll.model.token_logprobs import Imitation
from plimsoll.records import BatchCounts, Bools, Floats, Pack
from plimsoll.trainer.protocol import Engine, Objective, PackToLearn, TrainedEngine

S = TypeVar("S")
Shares = dict[str, list[torch.Tensor | float]]
"""For each metric's name, the shares of the micro-batches."""


@dataclass(frozen=True)
class NllObjective:
    """The mean negative log-likelihood of the learned tokens, for supervised fine-tuning.

    The stream is the noise on the micro-batch's embeddings, or None. Tokens are learned at
    temperature 1, whatever the role samples with.
    """

    def loss(self, engine: Engine, micro_batch: PackToLearn[EmbeddingNoise | None]) -> LossOutput:
        """Return the micro-batch's share of the mean negative log-likelihood."""
        lesson = Imitation(micro_batch.counts.tokens)
        loss: Tensor = engine.forward(micro_batch.send(), noise=micro_batch.stream, lesson=lesson)
        return LossOutput(loss, {"nll": loss.detach()})


@dataclass(frozen=True)
class TeacherForward:
    """A teacher's output for one micro-batch, which is the stream of a student.

    The teacher reads all packs of a step before the student learns from the first, so that an
    offloaded teacher is moved to the device once a step. The hidden states wait in host memory; the
    logits are computed chunk by chunk when they are compared.

    Attributes:
        hidden_L_H: The hidden states that are the head's input, in host memory. A card may still be
            writing them; see `keep_on_host`.
        teacher: The teacher's engine.
    """

    hidden_L_H: Tensor
    teacher: Engine

    @property
    def model(self) -> TeacherModel:
        """The teacher's model; use `head` to read the head's weights."""
        assert isinstance(self.teacher.module, TeacherModel)
        return self.teacher.module

    @contextmanager
    def head(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the head's undivided weight and bias (None without one) on the device."""
        names = self.model.head_names()
        with self.teacher.gather(names) as tensors:
            weight, *bias = (tensors[name].to(device, non_blocking=True) for name in names)
            yield weight, bias[0] if bias else None


def teacher_forward(
    teacher: Engine, packs: Iterable[Pack], device: torch.device
) -> list[TeacherForward]:
    """Return the teacher's hidden states for each pack."""
    with teacher.scoring():
        states = [
            keep_on_host(teacher.forward(PackTensors.from_pack(pack, device))) for pack in packs
        ]
    return [TeacherForward(hidden_L_H, teacher) for hidden_L_H in states]


@dataclass(frozen=True)
class DistillationObjective:
    """A student's objective: a divergence from its teacher, and the likelihood of the data.

    See `Lesson`.
    """

    divergence: Choice
    temperature: float
    nll_share: float

    def loss(self, engine: Engine, micro_batch: PackToLearn[TeacherForward]) -> LossOutput:
        """Return the micro-batch's share of the divergence and of the likelihood."""
        stream, device = micro_batch.stream, micro_batch.device
        with stream.head(device) as (weight_VH, bias_V):
            lesson = Lesson(
                hidden_L_H=stream.hidden_L_H.to(device, non_blocking=True),
                weight_VH=weight_VH,
                bias_V=bias_V,
                form=stream.model.form,
                divergence=divergence(self.divergence),
                temperature=self.temperature,
                nll_share=self.nll_share,
                tokens=micro_batch.counts.tokens,
            )
            distilled = Distilled(*engine.forward(micro_batch.send(), lesson=lesson))
        return LossOutput(
            distilled.loss, {"divergence": distilled.divergence, "nll": distilled.nll}
        )


@dataclass(frozen=True)
class PreferenceObjective:
    """A preference loss on packs of pairs, plus the chosen response's likelihood.

    `pack_pairs` makes the packs. The stream is each sequence's log-prob under the reference, or
    None for a reference-free loss.
    """

    preference_loss: Choice
    nll_weight: float

    def loss(self, engine: Engine, micro_batch: PackToLearn[Floats | None]) -> LossOutput:
        """Return the micro-batch's share of the preference loss."""
        pack, sent = micro_batch.send_with({"reference_S": micro_batch.stream})
        logprobs_L, _ = engine.forward(pack)
        inputs = PreferenceLossInputs(
            logprobs=in_pairs(sums(logprobs_L, pack.cu_loss_tokens)),
            lengths=in_pairs(pack.cu_loss_tokens.diff().float()),
            pairs=micro_batch.counts.sequences // 2,
        )
        reference = in_pairs(sent["reference_S"]) if sent else None
        loss = preference_loss(self.preference_loss)
        return preference_objective(inputs, reference, loss, self.nll_weight)


@dataclass(frozen=True)
class RewardObjective:
    """A reward model's objective on packs of pairs: a reward loss, and the centring of the scores.

    `pack_pairs` makes the packs; each sequence is scored at its end. The stream is each pair's
    margin, by which the chosen score should be higher; 0 if the data has none.
    """

    reward_loss: Choice
    centring: float

    def loss(self, engine: Engine, micro_batch: PackToLearn[Floats]) -> LossOutput:
        """Return the micro-batch's share of the reward loss."""
        pack, sent = micro_batch.send_with({"margins_P": micro_batch.stream})
        scores = in_pairs(engine.forward(at_ends(pack)))
        inputs = RewardLossInputs(scores, sent["margins_P"], micro_batch.counts.sequences // 2)
        return reward_objective(inputs, reward_loss(self.reward_loss), self.centring)


@dataclass(frozen=True)
class ProcessObjective:
    """A process reward model's objective: predict the label of each step of a response.

    The learned tokens are the last tokens of these steps. The stream is the steps' labels, in
    packed order.
    """

    def loss(self, engine: Engine, micro_batch: PackToLearn[Floats]) -> LossOutput:
        """Return the micro-batch's share of the loss on the labels of the responses' steps."""
        pack, sent = micro_batch.send_with({"labels_L": micro_batch.stream})
        return process_loss(engine.forward(at_marks(pack)), sent["labels_L"], micro_batch.counts)


@dataclass(frozen=True)
class FeedbackStream:
    """A micro-batch's data for a feedback loss: one entry per sequence, without fillers.

    Attributes:
        reference_logprobs_S: The sequence's log-prob under the reference.
        desirable_S: Whether the response is desirable.
    """

    reference_logprobs_S: Floats
    desirable_S: Bools


@dataclass(frozen=True)
class FeedbackObjective:
    """A feedback loss such as KTO's, on responses that are good or bad by themselves.

    Attributes:
        feedback_loss: The loss's name and settings.
        kl: The KL of the full optimizer step; see `FeedbackLossInputs`.
        labels: The counts of the labels in the full optimizer step.
    """

    feedback_loss: Choice
    kl: float
    labels: LabelCounts

    def loss(self, engine: Engine, micro_batch: PackToLearn[FeedbackStream]) -> LossOutput:
        """Return the micro-batch's share of the feedback loss."""
        pack, sent = micro_batch.send_with(vars(micro_batch.stream))
        logprobs_S = sums(engine.forward(pack)[0], pack.cu_loss_tokens)
        reference_S = sent["reference_logprobs_S"]
        # A filler is the only sequence of its pack.
        logratios_S = logprobs_S[: len(reference_S)] - reference_S
        inputs = FeedbackLossInputs(logratios_S, sent["desirable_S"], self.kl, self.labels)
        return feedback_loss(self.feedback_loss)(inputs)


@dataclass(frozen=True)
class PolicyStream:
    """A micro-batch's data for the policy loss: one number per learned token, in packed order.

    Attributes:
        advantages_L: Advantages.
        sampler_logprobs_L: Log-probs by the engine that sampled.
        old_logprobs_L: Log-probs under the old policy; None in strictly on-policy steps, where the
            old policy is the one that is being differentiated.
        reference_logprobs_L: Log-probs under the reference; None without a KL loss.
    """

    advantages_L: Floats
    sampler_logprobs_L: Floats
    old_logprobs_L: Floats | None
    reference_logprobs_L: Floats | None


@dataclass(frozen=True)
class PolicyObjective:
    """The policy's objective on sampled responses: a policy loss, the KL and an entropy bonus.

    See `PolicyTerms`.
    """

    policy_loss: Choice
    correction: Choice | None = None
    terms: PolicyTerms = field(default_factory=PolicyTerms)

    def loss(self, engine: Engine, micro_batch: PackToLearn[PolicyStream]) -> LossOutput:
        """Return the micro-batch's share of the policy loss."""
        pack, sent = micro_batch.send_with(vars(micro_batch.stream))
        logprobs_L, entropy_L = engine.forward(
            pack, entropy="loss" if self.terms.entropy_bonus > 0 else "metric"
        )
        old_L = sent.get("old_logprobs_L")
        policy = PolicyLossInputs(
            logprobs_L=logprobs_L,
            old_logprobs_L=logprobs_L.detach() if old_L is None else old_L,
            advantages_L=sent["advantages_L"],
            cu_loss_tokens=pack.cu_loss_tokens,
        )
        inputs = PolicyObjectiveInputs(
            policy, sent["sampler_logprobs_L"], entropy_L, sent.get("reference_logprobs_L")
        )
        return policy_objective(
            inputs, micro_batch.counts, self.terms, self._loss, self._correction
        )

    @cached_property
    def _loss(self) -> Callable[[PolicyObjectiveInputs], TokenLoss]:
        return policy_loss(self.policy_loss)

    @cached_property
    def _correction(self) -> Callable[[CorrectionInputs], TokenWeights] | None:
        return None if self.correction is None else correction(self.correction)


@dataclass(frozen=True)
class ValueStream:
    """A micro-batch's data for the critic: one number per learned token, in packed order."""

    returns_L: Floats
    old_values_L: Floats


@dataclass(frozen=True)
class ValueObjective:
    """The critic's objective: the clipped squared error of the value before every learned token.

    Attributes:
        clip: How far a value may move in one step; None for no limit.
    """

    clip: float | None

    def loss(self, engine: Engine, micro_batch: PackToLearn[ValueStream]) -> LossOutput:
        """Return the micro-batch's share of the value loss."""
        pack, sent = micro_batch.send_with(vars(micro_batch.stream))
        values_L = engine.forward(pack)
        return value_loss(values_L, **sent, counts=micro_batch.counts, clip=self.clip)


def score(
    engine: Engine,
    packs: Iterable[Pack],
    forward: Callable[[PackTensors], Tensor],
    device: torch.device,
) -> list[Floats]:
    """Return the result of `forward` for each pack: fp32, in host memory, without gradients.

    `forward` calls the engine's `forward`.
    """
    with engine.scoring():
        pack_scores = [forward(PackTensors.from_pack(pack, device)).float() for pack in packs]
    # Read scores only after the last forward: see `_totals`.
    return [pack_values.cpu().numpy() for pack_values in pack_scores]


def losses(
    engine: Engine,
    packs: Iterable[Pack],
    streams: Sequence[S],
    counts: BatchCounts,
    objective: Objective[S],
    device: torch.device,
) -> Iterator[LossOutput]:
    """Yield the loss and metrics of each pack, computed when the caller asks for them.

    `streams`: one per pack. `counts`: the counts of the optimizer step, over all ranks.
    """
    for pack, stream in zip(packs, streams, strict=True):
        # Nothing has a name here: it would be held while the next micro-batch is computed.
        yield fault_value(
            "rank.forward",
            objective.loss(engine, PackToLearn(pack, stream, counts, device)),
        )


def learn(engine: TrainedEngine, outputs: Iterable[LossOutput]) -> dict[str, float]:
    """Add up the gradients of the losses; return the rank's share of the loss and metrics."""
    shares: Shares = {}
    for output in outputs:
        fault_point("rank.backward")
        engine.backward(output.loss)
        _add_shares(shares, output)
    return _totals(shares)


def measure(engine: Engine, outputs: Iterable[LossOutput]) -> dict[str, float]:
    """Return the rank's share of the loss and of its metrics, without gradients."""
    shares: Shares = {}
    with engine.scoring():
        for output in outputs:
            _add_shares(shares, output)
    return _totals(shares)


def _add_shares(shares: Shares, output: LossOutput) -> None:
    """Add a micro-batch's loss and metrics to `shares`; tensors stay on their device."""
    for name, share in ({"loss": output.loss} | output.metrics).items():
        value = share.detach() if isinstance(share, torch.Tensor) else share
        shares.setdefault(name, []).append(value)


def _totals(shares: Shares) -> dict[str, float]:
    """Return the sums, by metric; call it only after the last micro-batch.

    To read a number from a card, the host waits until the card has done all queued work. Meanwhile
    it could not prepare the next micro-batch.
    """
    return {name: sum(map(float, values), 0.0) for name, values in shares.items()}
