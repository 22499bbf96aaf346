"""The loss of supervised fine-tuning, and what evaluations make of it."""

from __future__ import annotations

from math import exp

from torch import Tensor

from plimsoll.algorithm.inputs import LossOutput, token_mean
from plimsoll.records import BatchCounts


def nll(logprobs_L: Tensor, counts: BatchCounts) -> LossOutput:
    """The mean negative log-likelihood per learned token, in nats. Metric: `nll`, the same."""
    loss = -token_mean(logprobs_L, counts)
    return LossOutput(loss=loss, metrics={"nll": loss.detach()})


def perplexity(mean_nll: float) -> float:
    """Of a mean in nats; at most about 1e304, which a float still holds."""
    return exp(min(mean_nll, 700.0))
