"""Compute the loss of a process reward model, which predicts whether each step is right.

Lightman et al. 2023, "Let's Verify Step by Step", https://arxiv.org/abs/2305.20050, section 2.6.
Labels between 0 and 1 are the soft labels of Wang et al. 2024 (Math-Shepherd),
https://arxiv.org/abs/2312.08935; the loss is their equation 2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from plimsoll.algorithm.inputs import LossOutput, token_mean
from plimsoll.records import BatchCounts


def process_loss(scores_L: Tensor, labels_L: Tensor, counts: BatchCounts) -> LossOutput:
    """Return the mean over steps of -l log sigmoid(r) - (1 - l) log(1 - sigmoid(r)).

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
