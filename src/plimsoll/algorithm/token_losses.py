"""Losses of numbers at tokens: the critic's values, and the scores of steps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from plimsoll.algorithm.inputs import LossOutput, token_mean
from plimsoll.records import BatchCounts


def value_loss(
    values_L: Tensor,
    old_values_L: Tensor,
    returns_L: Tensor,
    counts: BatchCounts,
    clip: float | None,
) -> LossOutput:
    """Return half the mean over tokens of max((V - R)^2, (V_clipped - R)^2).

    V is the critic's value now, old_values_L has the values when the step began, and R is the
    return, the target. `counts` are those of the whole optimizer step.

    V_clipped stays within `clip` of the old value; without `clip` the result is half the mean
    squared error. The clipping follows the PPO authors' code (openai/baselines, ppo2), not the
    paper.

    Metrics: `value_mean`; `value_clip_fraction`, the share of tokens whose clipped error is the
    larger; `value_error`, the mean squared error before clipping.
    """
    error_L = (values_L - returns_L).square()
    worst_L = error_L
    if clip is not None:
        low_L, high_L = old_values_L - clip, old_values_L + clip
        clipped_L = values_L.clamp(low_L, high_L)  # exactly the value, within the bounds
        worst_L = torch.maximum(error_L, (clipped_L - returns_L).square())
    with torch.no_grad():
        metrics = {
            "value_mean": token_mean(values_L, counts),
            "value_clip_fraction": token_mean((worst_L > error_L).float(), counts),
            "value_error": token_mean(error_L, counts),
        }
    return LossOutput(loss=0.5 * token_mean(worst_L, counts), metrics=metrics)


def process_loss(scores_L: Tensor, labels_L: Tensor, counts: BatchCounts) -> LossOutput:
    """Return the mean over steps of -l log sigmoid(r) - (1 - l) log(1 - sigmoid(r)).

    It trains a process reward model, which predicts whether each step is right: Lightman et al.
    2023, "Let's Verify Step by Step", https://arxiv.org/abs/2305.20050, section 2.6. Labels between
    0 and 1 are the soft labels of Wang et al. 2024 (Math-Shepherd),
    https://arxiv.org/abs/2312.08935; the loss is their equation 2.

    r is the score of a solution's step, and l its label, from 0 (wrong) to 1 (right). The result is
    the micro-batch's share of the mean: `counts.tokens` is the number of solutions' steps in the
    entire optimizer step.

    Metrics, means over steps: `accuracy`, the share of steps where score and label agree (r > 0 and
    l > 0.5, or neither); `labels`, the mean label (the share of right steps if labels are 0 or 1).
    """
    losses_L = binary_cross_entropy_with_logits(scores_L, labels_L, reduction="none")
    with torch.no_grad():
        right_L = ((scores_L > 0) == (labels_L > 0.5)).float()
        metrics = {
            "accuracy": token_mean(right_L, counts),
            "labels": token_mean(labels_L, counts),
        }
    return LossOutput(token_mean(losses_L, counts), metrics)
