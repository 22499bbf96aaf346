"""From a loss at each token to one number for the step, by counts of the whole step."""

from __future__ import annotations

from typing import Literal, assert_never

from torch import Tensor

from plimsoll.algorithm.inputs import token_mean
from plimsoll.algorithm.sequences import means
from plimsoll.records import BatchCounts

Aggregation = Literal["tokens", "sequences", "constant"]


def aggregate(
    x_L: Tensor,
    cu_loss_tokens: Tensor,
    counts: BatchCounts,
    aggregation: Aggregation,
    constant: int,
) -> Tensor:
    """A micro-batch's share of the step's loss: a scalar.

    tokens: the mean over all action tokens of the step (DAPO, https://arxiv.org/abs/2503.14476,
        section 3.3). sequences: the mean over sequences of each one's mean over its tokens (GRPO,
        https://arxiv.org/abs/2402.03300). constant: the sum over sequences' tokens, over `constant`
        tokens for each sequence, so that length changes no token's weight (Dr. GRPO,
        https://arxiv.org/abs/2503.20783).
    """
    match aggregation:
        case "tokens":
            return token_mean(x_L, counts)
        case "sequences":
            return means(x_L, cu_loss_tokens).sum() / counts.sequences
        case "constant":
            return x_L.sum() / (counts.sequences * constant)
        case _:
            assert_never(aggregation)
