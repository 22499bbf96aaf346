"""Estimates of KL(policy || reference) from the policy's own samples, and its coefficient.

Estimators: John Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
Adaptive coefficient: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2.
"""

from __future__ import annotations

import math
from typing import Literal, assert_never

from torch import Tensor

from plimsoll.algorithm.ratios import k3
from plimsoll.errors import PlimsollError

KlEstimator = Literal["k1", "k2", "k3"]


def kl(logprobs_L: Tensor, reference_logprobs_L: Tensor, estimator: KlEstimator) -> Tensor:
    """Return an estimate of KL(policy || reference) at each token, in nats; shape [L].

    With d = log policy - log reference at tokens that the policy sampled:

    k1 = d: unbiased; single tokens may be negative.
    k2 = d^2 / 2: never negative; biased, little while the two are close.
    k3 = exp(-d) - 1 + d: never negative and unbiased. Below d = -20 it keeps its value at -20 (see
    `ratios.k3`), without a gradient.

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
