"""Importance ratios (new policy over old policy, trainer over sampler), and estimates of the KL."""

from __future__ import annotations

import math
from typing import Literal, assert_never

import torch
from torch import Tensor

from plimsoll.algorithm.inputs import CorrectionInputs, PolicyLossInputs
from plimsoll.algorithm.sequences import means, sequence_of_token, sums
from plimsoll.config.base import RatioLevel
from plimsoll.errors import PlimsollError

LARGEST = 20.0
"""The largest absolute log-ratio that is exponentiated unchanged.

e^20 is 4.9e8; e^88.8 overflows in float32, and its gradient times 0 is NaN.
"""


def ratios(logratios: Tensor) -> Tensor:
    """Return exp of the log-ratios, which are first clamped to +-`LARGEST`.

    A clamped log-ratio has no gradient. Below -`LARGEST` nothing is lost, for that gradient would
    be a ratio under 2.1e-9. Above `LARGEST`, the gradient of a single token would be 4.9e8 times
    that of any other; after the clipping of gradients, the step would learn from this token alone.
    So a loss that uses the ratio leaves the token out of the step. `is_clamped` marks such tokens.
    """
    return logratios.clamp(-LARGEST, LARGEST).exp()


@torch.no_grad()
def is_clamped(logratios: Tensor) -> Tensor:
    """Return 1 where `ratios` clamps a log-ratio, else 0."""
    return (logratios.abs() > LARGEST).float()


def k3(logratios: Tensor) -> Tensor:
    """Return Schulman's estimate exp(x) - 1 - x of a KL, with log-ratios x of at most `LARGEST`.

    Larger x would overflow and are clamped. For very negative x the estimate is nearly -x - 1, and
    keeps its gradient.
    """
    bounded = logratios.clamp(max=LARGEST)
    return bounded.expm1() - bounded


@torch.no_grad()
def ratio_metrics(inputs: PolicyLossInputs, exponent_L: Tensor) -> dict[str, Tensor]:
    """Return the metrics, for each token, that every policy loss with a ratio reports.

    `approx_kl`: an estimate (k3) of KL(old policy || new policy) in nats. `ratio`: the new
    probability over the old one. `ratio_clamped`: 1 where the log-ratio that the loss
    exponentiates, `exponent_L`, is clamped (see `ratios`).
    """
    logratio_L = inputs.logprobs_L - inputs.old_logprobs_L
    return {
        "approx_kl": k3(logratio_L),
        "ratio": ratios(logratio_L),
        "ratio_clamped": is_clamped(exponent_L),
    }


def sampler_ratios(inputs: CorrectionInputs, level: RatioLevel) -> Tensor:
    """Return for each token the trainer's probability divided by the sampler's, shape [L].

    The level `token` gives the ratio of the token itself; `sequence`, the product of the ratios of
    its sequence, which drifts away from 1 with length; `geometric`, their geometric mean, which
    does not drift.
    """
    logratio_L, cu_loss_tokens = inputs.logratio_L, inputs.cu_loss_tokens
    match level:
        case "token":
            return ratios(logratio_L)
        case "sequence":
            logratio_S = sums(logratio_L, cu_loss_tokens)
        case "geometric":
            logratio_S = means(logratio_L, cu_loss_tokens)
        case _:
            assert_never(level)
    return ratios(logratio_S)[sequence_of_token(cu_loss_tokens, len(logratio_L))]


OUTSIDE = (0.5, 2.0)
"""Bounds of the trainer's ratio to the sampler beyond which `mismatch/outside` counts a token."""


def mismatch_metrics(inputs: CorrectionInputs) -> dict[str, Tensor]:
    """Return measures of the distance between the trainer's and the sampler's log-probs, by token.

    `mismatch/abs`: the absolute difference (nats). `mismatch/k3`: an estimate of KL(sampler ||
    trainer) (nats). `mismatch/outside`: 1 where the ratio lies outside of `OUTSIDE`.
    `mismatch/clamped`: 1 where the log-ratio exceeds +-`LARGEST`; the other measures take it as
    +-`LARGEST`.
    """
    logratio_L = inputs.logratio_L.clamp(-LARGEST, LARGEST)
    ratio_L = ratios(logratio_L)
    low, high = OUTSIDE
    return {
        "mismatch/abs": logratio_L.abs(),
        "mismatch/k3": k3(logratio_L),
        "mismatch/outside": ((ratio_L < low) | (ratio_L > high)).float(),
        "mismatch/clamped": is_clamped(inputs.logratio_L),
    }


KlEstimator = Literal["k1", "k2", "k3"]


def kl(logprobs_L: Tensor, reference_logprobs_L: Tensor, estimator: KlEstimator) -> Tensor:
    """Return an estimate of KL(policy || reference) at each token, in nats; shape [L].

    Source: John Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.

    With d = log policy - log reference at tokens that the policy sampled:

    k1 = d: unbiased; single tokens may be negative.
    k2 = d^2 / 2: never negative; biased, little while the two are close.
    k3 = exp(-d) - 1 + d: never negative and unbiased. Below d = -20 it keeps its value at -20 (see
    `k3`), without a gradient.

    In a loss only the gradient counts, and it differs (Tang and Munos 2025,
    https://arxiv.org/abs/2506.09477). In expectation, the gradient of k2 is that of KL(policy ||
    reference). The gradient of k1 is zero: it adds noise and does not hold the policy back. The
    gradient of k3 is that of KL(reference || policy), much the same while the two are close.
    """
    difference_L = logprobs_L - reference_logprobs_L
    match estimator:
        case "k1":
            return difference_L
        case "k2":
            return 0.5 * difference_L.square()
        case "k3":
            return k3(-difference_L)
        case _:
            assert_never(estimator)


def adapt(
    coefficient: float, observed_kl: float, responses: int, target: float, horizon: int
) -> float:
    """Return the next KL coefficient: larger if the KL from the reference is above its target.

    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2.

    The error, observed_kl / target - 1, is clipped to +-0.2. The coefficient grows by this share
    per `horizon` responses. A step with more responses counts as one horizon, so the coefficient
    cannot turn negative. Both KLs are in nats per response, or both per token. Raises PlimsollError
    if the observed KL is not finite.
    """
    if not math.isfinite(observed_kl):
        raise PlimsollError(
            f"The KL from the reference is {observed_kl}: the policy's log-probs are no longer "
            f"finite, so training has diverged. Go back to a checkpoint, with a smaller "
            f"learning rate or a larger KL coefficient."
        )
    error = max(-0.2, min(0.2, observed_kl / target - 1))
    return coefficient * (1 + error * min(1.0, responses / horizon))
