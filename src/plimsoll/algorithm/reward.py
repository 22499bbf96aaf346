"""What a reward model minimises: a reward loss, and the centring of its scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from plimsoll.algorithm.inputs import LossOutput, PairValues, RewardLossInputs


def reward_objective(
    inputs: RewardLossInputs, loss: Callable[[RewardLossInputs], LossOutput], centring: float
) -> LossOutput:
    """loss + centring * `off_centre`.

    Metrics: the loss's own, and `reward_loss` and `off_centre`, the two terms.
    """
    output = loss(inputs)
    off = off_centre(inputs.scores, inputs.pairs)
    terms = {"reward_loss": output.loss.detach(), "off_centre": off.detach()}
    total = output.loss + centring * off
    return replace(output, loss=total, metrics=output.metrics | terms)


def off_centre(scores: PairValues, pairs: int) -> Tensor:
    """The micro-batch's share of the mean over pairs of (r(x, y_w) + r(x, y_l))^2: a scalar.

    Preferences say nothing of where scores lie, only of differences; this draws their mean to 0.
    Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244, the regulariser of their objective.
    """
    return (scores.chosen_P + scores.rejected_P).square().sum() / pairs
