"""The loss of supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

from plimsoll.algorithm.inputs import LossOutput, token_mean
from plimsoll.records import BatchCounts


def nll(logprobs_L: Tensor, counts: BatchCounts) -> LossOutput:
    """The mean negative log-likelihood per learned token, in nats. Metric: `nll`, the same."""
    loss = -token_mean(logprobs_L, counts)
    return LossOutput(loss=loss, metrics={"nll": loss.detach()})
