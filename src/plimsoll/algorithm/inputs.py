"""Inputs and outputs of losses and advantage estimators: frozen records of tensors.

Floats are float32. A name with `_L` is a flat tensor over the learned tokens of several sequences,
in packed order; the tokens of sequence s are `cu_loss_tokens[s]:cu_loss_tokens[s + 1]` of it.
A name with `_P` is a tensor over pairs.

Worked example: two sequences with 2 and 1 learned tokens have cu_loss_tokens = [0 2 3], and
advantages_L[2] belongs to the only learned token of the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from plimsoll.algorithm.sequences import sums, token_rewards
from plimsoll.records import BatchCounts, Column


@dataclass(frozen=True)
class PolicyLossInputs:
    """One micro-batch of a policy loss; only logprobs_L has a gradient.

    Attributes:
        logprobs_L: log-probs (nats) of the sampled tokens under the policy that learns.
        old_logprobs_L: the same under the policy as it was when the step began, by the trainer.
        advantages_L: the advantage of each token.
        cu_loss_tokens: int, shape [S + 1].
        columns: all columns of the policy loss, shape [L], these among them; see `records.Column`.
    """

    logprobs_L: Tensor
    old_logprobs_L: Tensor
    advantages_L: Tensor
    cu_loss_tokens: Tensor
    columns: Mapping[Column, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.logprobs_L.ndim == 1 and self.cu_loss_tokens.ndim == 1
        for x_L in (self.old_logprobs_L, self.advantages_L, *self.columns.values()):
            assert x_L.shape == self.logprobs_L.shape


@dataclass(frozen=True)
class TokenLoss:
    """The policy loss of each token.

    Attributes:
        loss_L: the loss of each token, before it is aggregated.
        metrics: tensors of shape [L] without a gradient; the run reports the mean of each over the
            step's tokens.
    """

    loss_L: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class CorrectionInputs:
    """One micro-batch of a correction for the sampler's difference from the trainer; no gradients.

    Attributes:
        logratio_L: the trainer's log-probs (nats) of the sampled tokens minus the sampler's, both
            under the policy as it was when the step began.
        cu_loss_tokens: int, shape [S + 1].
    """

    logratio_L: Tensor
    cu_loss_tokens: Tensor

    def __post_init__(self) -> None:
        assert self.logratio_L.ndim == 1 and self.cu_loss_tokens.ndim == 1


@dataclass(frozen=True)
class PairValues:
    """A number for each response of P >= 0 pairs, such as its log-prob; both tensors have [P]."""

    chosen_P: Tensor
    rejected_P: Tensor

    def __post_init__(self) -> None:
        assert self.chosen_P.ndim == 1 and self.chosen_P.shape == self.rejected_P.shape

    def __sub__(self, other: PairValues) -> PairValues:
        return PairValues(self.chosen_P - other.chosen_P, self.rejected_P - other.rejected_P)

    def __truediv__(self, other: PairValues) -> PairValues:
        return PairValues(self.chosen_P / other.chosen_P, self.rejected_P / other.rejected_P)

    def __rmul__(self, factor: float) -> PairValues:
        return PairValues(factor * self.chosen_P, factor * self.rejected_P)

    @property
    def margin_P(self) -> Tensor:
        """The chosen response's value minus the rejected one's."""
        return self.chosen_P - self.rejected_P


@dataclass(frozen=True)
class PreferenceLossInputs:
    """One micro-batch of a preference loss; only logprobs has a gradient.

    Attributes:
        logprobs: log-probs (nats) of whole responses, given the prompt, under the policy that
            learns.
        lengths: the numbers of learned tokens of the responses, as floats.
        pairs: the number of pairs of the whole optimizer step, not of this micro-batch.
    """

    logprobs: PairValues
    lengths: PairValues
    pairs: int

    def __post_init__(self) -> None:
        assert self.logprobs.chosen_P.shape == self.lengths.chosen_P.shape and self.pairs > 0


@dataclass(frozen=True)
class RewardLossInputs:
    """One micro-batch of a reward loss; only scores has a gradient.

    Attributes:
        scores: the scores of whole responses, given the prompt.
        margins_P: how far the chosen response's score should be ahead; 0 if the data does not say.
        pairs: the number of pairs of the whole optimizer step, not of this micro-batch.
    """

    scores: PairValues
    margins_P: Tensor
    pairs: int

    def __post_init__(self) -> None:
        assert self.scores.chosen_P.shape == self.margins_P.shape and self.pairs > 0


@dataclass(frozen=True)
class LabelCounts:
    """The numbers of responses of each label in an optimizer step, over all ranks."""

    desirable: int
    undesirable: int

    @property
    def responses(self) -> int:
        """The number of responses with either label."""
        return self.desirable + self.undesirable


@dataclass(frozen=True)
class FeedbackLossInputs:
    """One micro-batch of a feedback loss, S >= 0 responses; only logratios_S has a gradient.

    Attributes:
        logratios_S: log-probs (nats) of whole responses, given the prompt, under the policy that
            learns minus those under the reference.
        desirable_S: bool, the labels.
        kl: how far the policy has moved from the reference, nats per response; never negative, and
            the same for the whole step.
        counts: the counts of the whole optimizer step, not of this micro-batch.
    """

    logratios_S: Tensor
    desirable_S: Tensor
    kl: float
    counts: LabelCounts

    def __post_init__(self) -> None:
        assert self.logratios_S.ndim == 1 and self.logratios_S.shape == self.desirable_S.shape
        assert self.kl >= 0 and self.counts.responses > 0


@dataclass(frozen=True)
class DivergenceInputs:
    """A block of next-token distributions, as log-probs (nats) over one vocabulary, shape [N, V].

    Neither tensor has a gradient, and neither may be changed.
    """

    student_NV: Tensor
    teacher_NV: Tensor

    def __post_init__(self) -> None:
        assert self.student_NV.ndim == 2 and self.student_NV.shape == self.teacher_NV.shape


@dataclass(frozen=True)
class DivergenceOutput:
    """The divergence of each row (nats), and its gradient with respect to the student's logits."""

    values_N: Tensor
    gradient_NV: Tensor


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of the mean loss of an optimizer step, and of the mean of each metric.

    Each share is a scalar: the sum over the micro-batch divided by the count of the entire step.
    The shares of all micro-batches and ranks add up to the means over the step.

    Attributes:
        loss: the share of the loss.
        metrics: the shares of the metrics, without a gradient.
        right_P: for pairs, 1 if the chosen response is ahead, 0.5 for a tie, else 0. The mean is
            the metric `accuracy`, and an evaluation computes its interval from these values. None:
            the accuracy has no interval.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    right_P: Tensor | None = None


@dataclass(frozen=True)
class TokenWeights:
    """A correction's factor for the policy loss of each token, shape [L]; no gradient."""

    weights_L: Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """All sequences of a batch, for an advantage estimator.

    Attributes:
        parts_SR: the values of the R reward parts of each response; float64.
        weights_R: the weight of each part; float64.
        shaping_L: further rewards of single tokens, such as minus the KL from the reference; 0 if
            there are none.
        cu_loss_tokens: int, shape [S + 1].
        placed_L: the share of the scores that belongs to single tokens, because an environment gave
            rewards for turns; None: the score belongs to the last token.
    """

    parts_SR: Tensor
    weights_R: Tensor
    shaping_L: Tensor
    cu_loss_tokens: Tensor
    placed_L: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.placed_L is None or self.placed_L.shape == self.shaping_L.shape
        assert self.parts_SR.ndim == 2 and self.shaping_L.ndim == 1
        assert self.weights_R.shape == self.parts_SR.shape[1:]
        assert self.cu_loss_tokens.shape == (len(self.parts_SR) + 1,)

    @property
    def scores_S(self) -> Tensor:
        """The reward of each response: the weighted sum of its parts.

        It is float64, so that rounding of equal rewards is negligible beside an estimator's delta.
        """
        return (self.parts_SR * self.weights_R).sum(1)

    @property
    def rewards_L(self) -> Tensor:
        """The reward of each token: its shaping and placed share; the last token adds the rest."""
        scores_S, shaping_L = self.scores_S, self.shaping_L
        if self.placed_L is not None:
            placed_S = sums(self.placed_L.double(), self.cu_loss_tokens)
            scores_S, shaping_L = scores_S - placed_S, shaping_L + self.placed_L
        return token_rewards(scores_S.float(), shaping_L, self.cu_loss_tokens)


@dataclass(frozen=True)
class Advantages:
    """The output of an advantage estimator.

    Attributes:
        advantages_L: the advantages for the policy loss.
        returns_L: the targets of the value loss; None for an estimator without values.
    """

    advantages_L: Tensor
    returns_L: Tensor | None = None


def token_mean(x_L: Tensor, counts: BatchCounts) -> Tensor:
    """Return the micro-batch's share of the mean over the step's learned tokens: a scalar.

    It is 0 in a step without such tokens.
    """
    return x_L.sum() / max(1, counts.tokens)
