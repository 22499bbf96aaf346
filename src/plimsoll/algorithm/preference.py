"""Objectives on pairs: a preference or reward loss, plus its regulariser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from plimsoll.algorithm.inputs import LossOutput, PairValues, PreferenceLossInputs, RewardLossInputs


def in_pairs(x_S: Tensor) -> PairValues:
    """Return the numbers of a pack's sequences as pairs; they alternate: chosen, rejected, ...

    The result is empty for a filler, which is a single sequence.
    """
    even_S = x_S[: len(x_S) // 2 * 2]
    return PairValues(even_S[0::2], even_S[1::2])


def preference_objective(
    inputs: PreferenceLossInputs,
    reference: PairValues | None,
    loss: Callable[..., LossOutput],
    nll_weight: float,
) -> LossOutput:
    """Return loss + nll_weight * mean over pairs of the chosen response's negative log-likelihood.

    The likelihood is the mean per token; the second term is that of Pang et al. 2024,
    https://arxiv.org/abs/2404.19733, equation 1. Metrics: the loss's own, and `preference_loss` and
    `nll` (nats per token), the two terms. `reference` is the loss's second argument, if it takes
    one.
    """
    output = loss(inputs) if reference is None else loss(inputs, reference)
    nll = chosen_nll(inputs).sum() / inputs.pairs
    terms = {"preference_loss": output.loss.detach(), "nll": nll.detach()}
    total = output.loss + nll_weight * nll
    return replace(output, loss=total, metrics=output.metrics | terms)


def chosen_nll(inputs: PreferenceLossInputs) -> Tensor:
    """Return each chosen response's mean negative log-likelihood, nats per token; shape [P]."""
    return -inputs.logprobs.chosen_P / inputs.lengths.chosen_P


def preference_output(losses_P: Tensor, rewards: PairValues, pairs: int) -> LossOutput:
    """Return a preference loss's output: its mean over the step's pairs, with metrics.

    Metrics, means over pairs: `accuracy`, the share of pairs whose chosen response has the larger
    reward (a tie counts half); `rewards/margin`, `rewards/chosen`, `rewards/rejected`. `rewards`
    are those that the loss assigns to the responses. `pairs` is the count of the optimizer step.
    """
    with torch.no_grad():
        margin_P = rewards.margin_P
        right_P = (margin_P.sign() + 1) / 2
        metrics_P = {
            "accuracy": right_P,
            "rewards/margin": margin_P,
            "rewards/chosen": rewards.chosen_P,
            "rewards/rejected": rewards.rejected_P,
        }
        metrics = {name: x_P.sum() / pairs for name, x_P in metrics_P.items()}
    return LossOutput(losses_P.sum() / pairs, metrics, right_P)


def reward_objective(
    inputs: RewardLossInputs, loss: Callable[[RewardLossInputs], LossOutput], centring: float
) -> LossOutput:
    """Return the reward loss plus `centring` times `off_centre`, with metrics.

    Metrics: those of the loss, and the two terms, `reward_loss` and `off_centre`.
    """
    output = loss(inputs)
    off = off_centre(inputs.scores, inputs.pairs)
    terms = {"reward_loss": output.loss.detach(), "off_centre": off.detach()}
    total = output.loss + centring * off
    return replace(output, loss=total, metrics=output.metrics | terms)


def off_centre(scores: PairValues, pairs: int) -> Tensor:
    """Return the micro-batch's share of the mean over pairs of (r(x, y_w) + r(x, y_l))^2: a scalar.

    Preferences fix only differences of scores; this term draws their mean to 0. Source: Eisenstein
    et al. 2023, https://arxiv.org/abs/2312.09244, the regulariser of their objective.
    """
    return (scores.chosen_P + scores.rejected_P).square().sum() / pairs
