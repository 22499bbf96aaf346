"""Importance ratios: of the policy that learns over the one that a step began with, and of the
trainer over the sampler."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from plimsoll.algorithm.inputs import CorrectionInputs, PolicyLossInputs
from plimsoll.algorithm.kl import kl
from plimsoll.algorithm.sequences import means, sequence_of_token, sums
from plimsoll.config.base import RatioLevel

_LARGEST = 20.0
"""Of a log-ratio, so that its exponential stays finite and its products do too."""


@torch.no_grad()
def ratio_metrics(inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """What every policy loss with a ratio reports of each token: `approx_kl`, an estimate (k3) of
    KL(old policy || new policy) in nats; `ratio`, the new probability over the old one."""
    return {
        "approx_kl": kl(inputs.old_logprobs_L, inputs.logprobs_L, "k3"),
        "ratio": (inputs.logprobs_L - inputs.old_logprobs_L).exp(),
    }


def sampler_ratios(inputs: CorrectionInputs, level: RatioLevel) -> Tensor:
    """The trainer's probability over the sampler's, shape [L].

    token: of each token. sequence: the product over its sequence; it drifts away from 1 with
    length. geometric: the geometric mean over its sequence, which does not.
    """
    logratio_L, cu_loss_tokens = inputs.logratio_L, inputs.cu_loss_tokens
    match level:
        case "token":
            return _exp(logratio_L)
        case "sequence":
            found_S = sums(logratio_L, cu_loss_tokens)
        case "geometric":
            found_S = means(logratio_L, cu_loss_tokens)
        case _:
            assert_never(level)
    return _exp(found_S)[sequence_of_token(cu_loss_tokens, len(logratio_L))]


def _exp(logratios: Tensor) -> Tensor:
    return logratios.clamp(-_LARGEST, _LARGEST).exp()


OUTSIDE = (0.5, 2.0)
"""Ratios of trainer over sampler that `mismatch/outside` counts lie outside of these bounds."""


def mismatch_metrics(inputs: CorrectionInputs) -> dict[str, Tensor]:
    """How far the trainer's log-probs are from the sampler's, of each token: `mismatch/abs`, the
    absolute difference (nats); `mismatch/k3`, an estimate of KL(sampler || trainer) (nats);
    `mismatch/outside`, 1 where the ratio lies outside of `OUTSIDE`."""
    logratio_L = inputs.logratio_L.clamp(-_LARGEST, _LARGEST)
    ratio_L = logratio_L.exp()
    low, high = OUTSIDE
    return {
        "mismatch/abs": logratio_L.abs(),
        "mismatch/k3": logratio_L.expm1() - logratio_L,
        "mismatch/outside": ((ratio_L < low) | (ratio_L > high)).float(),
    }
