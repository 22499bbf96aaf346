"""A soft gate instead of a clip (SAPO); Gao et al. 2025, https://arxiv.org/abs/2511.20347."""

from __future__ import annotations

import torch

from plimsoll.algorithm.inputs import PolicyLossInputs, TokenLoss
from plimsoll.algorithm.ratios import ratio_metrics, ratios
from plimsoll.config.base import PositiveFloat


def loss(
    inputs: PolicyLossInputs,
    *,
    tau_positive: PositiveFloat = 1.0,
    tau_negative: PositiveFloat = 1.05,
) -> TokenLoss:
    """Return -(4 / tau) * sigmoid(tau * (ratio - 1)) * A of each token.

    tau is tau_positive where A >= 0 and tau_negative elsewhere. Near a ratio of 1 the loss has the
    gradient of ratio * A, and far from it hardly any. Metrics: those of `ratio_metrics`.
    """
    logratio_L = inputs.logprobs_L - inputs.old_logprobs_L
    ratio_L = ratios(logratio_L)
    tau_L = torch.where(inputs.advantages_L >= 0, tau_positive, tau_negative)
    gate_L = torch.sigmoid(tau_L * (ratio_L - 1)) * 4 / tau_L
    return TokenLoss(-gate_L * inputs.advantages_L, ratio_metrics(inputs, logratio_L))
