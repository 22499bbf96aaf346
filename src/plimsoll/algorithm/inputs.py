"""What the losses and the advantage estimators take and give: frozen records of tensors.

Floats are float32. `_L` is the learned tokens of several sequences, flat, in packed order;
sequence s holds the tokens from `cu_loss_tokens[s]` to `cu_loss_tokens[s + 1]`. `_P` is pairs.

Worked example: two sequences with 2 and 1 learned tokens have cu_loss_tokens = [0 2 3], and
advantages_L[2] belongs to the only learned token of the second.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from plimsoll.algorithm.sequences import sums
from plimsoll.algorithm.token_rewards import token_rewards
from plimsoll.records import BatchCounts


@dataclass(frozen=True)
class PolicyLossInputs:
    """One micro-batch of a policy loss; only logprobs_L has a gradient.

    logprobs_L, old_logprobs_L: log-probs (nats) of the sampled tokens under the policy that
        learns and under the policy as it was when the step began, both by the trainer.
    cu_loss_tokens: int, shape [S + 1].
    """

    logprobs_L: Tensor
    old_logprobs_L: Tensor
    advantages_L: Tensor
    cu_loss_tokens: Tensor

    def __post_init__(self) -> None:
        assert self.logprobs_L.ndim == 1 and self.cu_loss_tokens.ndim == 1
        assert self.logprobs_L.shape == self.old_logprobs_L.shape == self.advantages_L.shape


@dataclass(frozen=True)
class TokenLoss:
    """What a policy loss makes of each token. loss_L: before it is aggregated. metrics: each of
    shape [L], without a gradient; the run reports its mean over the step's tokens."""

    loss_L: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class CorrectionInputs:
    """One micro-batch of a correction for sampler against trainer; nothing has a gradient.

    logratio_L: the log-probs (nats) of the sampled tokens by the trainer, under the policy as it
        was when the step began, minus the sampler's own.
    cu_loss_tokens: int, shape [S + 1].
    """

    logratio_L: Tensor
    cu_loss_tokens: Tensor

    def __post_init__(self) -> None:
        assert self.logratio_L.ndim == 1 and self.cu_loss_tokens.ndim == 1


@dataclass(frozen=True)
class ValueLossInputs:
    """One micro-batch of the value loss; only values_L has a gradient.

    values_L, old_values_L: the critic's values now and when the step began.
    returns_L: what the values should have been.
    counts: of the whole optimizer step, not of this micro-batch.
    """

    values_L: Tensor
    old_values_L: Tensor
    returns_L: Tensor
    counts: BatchCounts

    def __post_init__(self) -> None:
        assert self.values_L.ndim == 1
        assert self.values_L.shape == self.old_values_L.shape == self.returns_L.shape


@dataclass(frozen=True)
class PairValues:
    """One number for each response of several pairs, such as its log-prob; shape [P], maybe 0."""

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
        """By how much the chosen response is ahead."""
        return self.chosen_P - self.rejected_P


@dataclass(frozen=True)
class PreferenceLossInputs:
    """One micro-batch of a preference loss; only logprobs has a gradient.

    logprobs: log-probs (nats) of whole responses, given the prompt, under the policy that learns.
    lengths: the responses' learned tokens, as floats.
    pairs: of the whole optimizer step, not of this micro-batch.
    """

    logprobs: PairValues
    lengths: PairValues
    pairs: int

    def __post_init__(self) -> None:
        assert self.logprobs.chosen_P.shape == self.lengths.chosen_P.shape and self.pairs > 0


@dataclass(frozen=True)
class RewardLossInputs:
    """One micro-batch of a reward loss; only scores has a gradient.

    scores: of whole responses, given the prompt.
    margins_P: by how much the chosen response's score should be ahead, 0 where nothing is said.
    pairs: of the whole optimizer step, not of this micro-batch.
    """

    scores: PairValues
    margins_P: Tensor
    pairs: int

    def __post_init__(self) -> None:
        assert self.scores.chosen_P.shape == self.margins_P.shape and self.pairs > 0


@dataclass(frozen=True)
class LabelCounts:
    """How many responses of each label an optimizer step has, over all ranks."""

    desirable: int
    undesirable: int

    @property
    def responses(self) -> int:
        """All of them."""
        return self.desirable + self.undesirable


@dataclass(frozen=True)
class FeedbackLossInputs:
    """One micro-batch of an feedback loss, shape [S], maybe 0; only logratios_S has a gradient.

    logratios_S: log-probs (nats) of whole responses, given the prompt, under the policy that learns
        minus those under the reference.
    desirable_S: bool, the labels.
    kl: nats per response, by how much the policy has moved from the reference; never negative, and
        the same for the whole step.
    counts: of the whole optimizer step, not of this micro-batch.
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
    """A block of next-token distributions, as log-probs (nats) over the same vocabulary, shape
    [N, V]; neither has a gradient, and neither may be changed.
    """

    student_NV: Tensor
    teacher_NV: Tensor

    def __post_init__(self) -> None:
        assert self.student_NV.ndim == 2 and self.student_NV.shape == self.teacher_NV.shape


@dataclass(frozen=True)
class DivergenceOutput:
    """values_N: of each row, nats. gradient_NV: of each row's value by the student's logits, a
    tensor of its own."""

    values_N: Tensor
    gradient_NV: Tensor


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of the batch's mean loss, and of the mean of each metric.

    Both are scalars: a sum over the micro-batch divided by the whole step's count. Added
    over micro-batches and ranks, losses, gradients and metrics are those of the whole batch.
    Metrics carry no gradient.

    right_P: of pairs, what the metric `accuracy` is the mean of: 1 where the chosen response is
        ahead, 0.5 for a tie, else 0. An evaluation's interval is made of it; None: it has none.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    right_P: Tensor | None = None


@dataclass(frozen=True)
class TokenWeights:
    """What a correction multiplies the policy loss of each token with, shape [L]; no gradient."""

    weights_L: Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """A whole batch of sequences, for an advantage estimator.

    parts_SR: the reward of each whole response, part by part, and weights_R of the parts; float64.
        A batch with one reward has R = 1.
    shaping_L: what else each token is rewarded with, such as less the KL from the reference; 0
        where there is nothing.
    cu_loss_tokens: int, shape [S + 1].
    placed_L: of the scores, what belongs to single tokens, as an environment gave it for turns;
        None: all of it belongs to the last one.
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
        """The reward of each whole response: the weighted sum of its parts; float64, so that what
        equal rewards differ by is nothing beside a delta."""
        return (self.parts_SR * self.weights_R).sum(1)

    @property
    def rewards_L(self) -> Tensor:
        """The reward of each token: the shaping, what is placed at it, and at the last one the rest
        of the score (see token_rewards)."""
        scores_S, shaping_L = self.scores_S, self.shaping_L
        if self.placed_L is not None:
            placed_S = sums(self.placed_L.double(), self.cu_loss_tokens)
            scores_S, shaping_L = scores_S - placed_S, shaping_L + self.placed_L
        return token_rewards(scores_S.float(), shaping_L, self.cu_loss_tokens)


@dataclass(frozen=True)
class Advantages:
    """advantages_L for the policy loss; returns_L, the target of the value loss, of an estimator
    that takes values."""

    advantages_L: Tensor
    returns_L: Tensor | None = None


def token_mean(x_L: Tensor, counts: BatchCounts) -> Tensor:
    """The micro-batch's share of the mean over the step's learned tokens: a scalar."""
    assert counts.tokens > 0
    return x_L.sum() / counts.tokens
