"""The objectives that roles learn: a forward of one micro-batch, and its share of the loss.

Functions beside them do so for a rank's micro-batches, one after another: they compute scores, or
losses and gradients.

An objective is a frozen dataclass that is sent to the ranks with every optimizer step. The columns
that it reads go with it for each micro-batch. `Worker.train` accepts any object with the method
`loss` of `protocol.Objective`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

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
from plimsoll.model.policy import (
    EmbeddingNoise,
    PackTensors,
    ReadAt,
    TeacherModel,
    at_ends,
    at_marks,
    before_learned,
)
from plimsoll.model.sending import keep_on_host
from plimsoll.model.token_logprobs import Imitation
from plimsoll.records import (
    ADVANTAGES,
    RETURNS,
    TRAINER_LOGPROBS,
    VALUES,
    BatchCounts,
    Column,
    Floats,
    Pack,
    PackColumns,
)
from plimsoll.trainer.protocol import Engine, Objective, PackToLearn, TrainedEngine

SEQUENCE_REFERENCE = Column("sequence_reference", "S")
"""The log-prob (nats) of each sequence's response under the reference."""
MARGIN = Column("margin", "S")
"""By how much the chosen response's score should be higher, for both sequences of a pair; 0 if the
data has none."""
STEP_LABELS = Column("step_labels")
"""The labels of a response's steps; the learned tokens are the last tokens of these steps."""
DESIRABLE = Column("desirable", "S", "bool")
"""Whether a response is desirable."""
NOISE_SEEDS = Column("noise_seeds", "S", "int64")
"""The seed of the noise on each sequence's embeddings."""
TEACHER = Column("teacher")
"""The `TeacherForward` of a micro-batch, which is made on a rank and stays there."""
Shares = dict[str, list[torch.Tensor | float]]
"""For each metric's name, the shares of the micro-batches."""


@dataclass(frozen=True)
class NllObjective:
    """The mean negative log-likelihood of the learned tokens, for supervised fine-tuning.

    Tokens are learned at temperature 1, whatever the role samples with.

    Attributes:
        noise: The strength of the noise on embeddings, whose seeds are `NOISE_SEEDS`; None: no
            noise.
    """

    noise: float | None = None

    def loss(self, engine: Engine, micro_batch: PackToLearn) -> LossOutput:
        """Return the micro-batch's share of the mean negative log-likelihood."""
        lesson, pack = Imitation(micro_batch.counts.tokens), micro_batch.send()
        noise = None
        if self.noise is not None and micro_batch.pack.loss_tokens:  # a filler has no seed
            seeds = tuple(micro_batch.columns[NOISE_SEEDS].tolist())
            noise = EmbeddingNoise(self.noise, pack.layout.own, seeds)
        loss: Tensor = engine.forward(pack, noise=noise, lesson=lesson)
        return LossOutput(loss, {"nll": loss.detach()})


@dataclass(frozen=True)
class TeacherForward:
    """A teacher's output for one micro-batch, from which a student learns.

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
) -> list[PackColumns]:
    """Return the column `TEACHER` for each pack."""
    with teacher.scoring():
        states = [
            keep_on_host(teacher.forward(PackTensors.from_pack(pack, device))) for pack in packs
        ]
    return [{TEACHER: TeacherForward(hidden_L_H, teacher)} for hidden_L_H in states]


@dataclass(frozen=True)
class DistillationObjective:
    """A student's objective: a divergence from its teacher, and the likelihood of the data.

    See `Lesson`.
    """

    divergence: Choice
    temperature: float
    nll_share: float

    def loss(self, engine: Engine, micro_batch: PackToLearn) -> LossOutput:
        """Return the micro-batch's share of the divergence and of the likelihood."""
        teacher: TeacherForward = micro_batch.columns[TEACHER]
        device = micro_batch.device
        with teacher.head(device) as (weight_VH, bias_V):
            lesson = Lesson(
                hidden_L_H=teacher.hidden_L_H.to(device, non_blocking=True),
                weight_VH=weight_VH,
                bias_V=bias_V,
                form=teacher.model.form,
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

    `pack_pairs` makes the packs. A reference-free loss has no `SEQUENCE_REFERENCE`.
    """

    preference_loss: Choice
    nll_weight: float

    def loss(self, engine: Engine, micro_batch: PackToLearn) -> LossOutput:
        """Return the micro-batch's share of the preference loss."""
        pack, sent = micro_batch.send_with_columns()
        logprobs_L, _ = engine.forward(pack)
        inputs = PreferenceLossInputs(
            logprobs=in_pairs(sums(logprobs_L, pack.cu_loss_tokens)),
            lengths=in_pairs(pack.cu_loss_tokens.diff().float()),
            pairs=micro_batch.counts.sequences // 2,
        )
        reference = in_pairs(sent[SEQUENCE_REFERENCE]) if sent else None
        loss = preference_loss(self.preference_loss)
        return preference_objective(inputs, reference, loss, self.nll_weight)


@dataclass(frozen=True)
class RewardObjective:
    """A reward model's objective on packs of pairs: a reward loss, and the centring of the scores.

    `pack_pairs` makes the packs; each sequence is scored at its end.
    """

    reward_loss: Choice
    centring: float

    def loss(self, engine: Engine, micro_batch: PackToLearn) -> LossOutput:
        """Return the micro-batch's share of the reward loss."""
        pack, sent = micro_batch.send_with_columns(at_ends)
        scores, margins_P = in_pairs(engine.forward(pack)), in_pairs(sent[MARGIN]).chosen_P
        inputs = RewardLossInputs(scores, margins_P, micro_batch.counts.sequences // 2)
        return reward_objective(inputs, reward_loss(self.reward_loss), self.centring)


@dataclass(frozen=True)
class ProcessObjective:
    """A process reward model's objective: predict the label of each step of a response."""

    def loss(self, engine: Engine, micro_batch: PackToLearn) -> LossOutput:
        """Return the micro-batch's share of the loss on the labels of the responses' steps."""
        pack, sent = micro_batch.send_with_columns(at_marks)
        return process_loss(engine.forward(pack), sent[STEP_LABELS], micro_batch.counts)


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

    def loss(self, engine: Engine, micro_batch: PackToLearn) -> LossOutput:
        """Return the micro-batch's share of the feedback loss."""
        pack, sent = micro_batch.send_with_columns()
        logprobs_S = sums(engine.forward(pack)[0], pack.cu_loss_tokens)
        reference_S = sent[SEQUENCE_REFERENCE]
        # A filler is the only sequence of its pack.
        logratios_S = logprobs_S[: len(reference_S)] - reference_S
        inputs = FeedbackLossInputs(logratios_S, sent[DESIRABLE], self.kl, self.labels)
        return feedback_loss(self.feedback_loss)(inputs)


@dataclass(frozen=True)
class PolicyObjective:
    """The policy's objective on sampled responses: a policy loss, the KL and an entropy bonus.

    See `PolicyTerms`.
    """

    policy_loss: Choice
    correction: Choice | None = None
    terms: PolicyTerms = field(default_factory=PolicyTerms)

    def loss(self, engine: Engine, micro_batch: PackToLearn) -> LossOutput:
        """Return the micro-batch's share of the policy loss."""
        pack, sent = micro_batch.send_with_columns()
        logprobs_L, entropy_L = engine.forward(
            pack, entropy="loss" if self.terms.entropy_bonus > 0 else "metric"
        )
        policy = PolicyLossInputs(
            logprobs_L=logprobs_L,
            # without the column, the policy that learns still is the old policy
            old_logprobs_L=sent.get(TRAINER_LOGPROBS, logprobs_L.detach()),
            advantages_L=sent[ADVANTAGES],
            cu_loss_tokens=pack.cu_loss_tokens,
            columns=sent,
        )
        inputs = PolicyObjectiveInputs(policy, entropy_L)
        output = policy_objective(
            inputs, micro_batch.counts, self.terms, self._loss, self._correction
        )
        rerouted = {} if pack.routing is None else pack.routing.metrics()
        return replace(output, metrics={**output.metrics, **rerouted})

    @cached_property
    def _loss(self) -> Callable[[PolicyObjectiveInputs], TokenLoss]:
        return policy_loss(self.policy_loss)

    @cached_property
    def _correction(self) -> Callable[[CorrectionInputs], TokenWeights] | None:
        return None if self.correction is None else correction(self.correction)


@dataclass(frozen=True)
class ValueObjective:
    """The critic's objective: the clipped squared error of the value before every learned token.

    Attributes:
        clip: How far a value may move in one step; None for no limit.
    """

    clip: float | None

    def loss(self, engine: Engine, micro_batch: PackToLearn) -> LossOutput:
        """Return the micro-batch's share of the value loss."""
        pack, sent = micro_batch.send_with_columns()
        values_L = engine.forward(pack)
        values = {"old_values_L": sent[VALUES], "returns_L": sent[RETURNS]}
        return value_loss(values_L, **values, counts=micro_batch.counts, clip=self.clip)


def score(
    engine: Engine,
    packs: Iterable[Pack],
    forward: Callable[[PackTensors], Tensor],
    device: torch.device,
    read_at: ReadAt = before_learned,
) -> list[Floats]:
    """Return the result of `forward` for each pack: fp32, in host memory, without gradients.

    `forward` calls the engine's `forward`. `read_at` chooses the rows at which the model gives its
    output.
    """
    with engine.scoring():
        pack_scores = [
            forward(PackTensors.from_pack(pack, device, read_at)).float() for pack in packs
        ]
    # Read scores only after the last forward: see `_totals`.
    return [pack_values.cpu().numpy() for pack_values in pack_scores]


def losses(
    engine: Engine,
    packs: Iterable[Pack],
    columns: Sequence[PackColumns],
    counts: BatchCounts,
    objective: Objective,
    device: torch.device,
) -> Iterator[LossOutput]:
    """Yield the loss and metrics of each pack, computed when the caller asks for them.

    `columns`: those of each pack. `counts`: the counts of the optimizer step, over all ranks.
    """
    for pack, of_pack in zip(packs, columns, strict=True):
        # Nothing has a name here: it would be held while the next micro-batch is computed.
        yield fault_value(
            "rank.forward",
            objective.loss(engine, PackToLearn(pack, of_pack, counts, device)),
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
