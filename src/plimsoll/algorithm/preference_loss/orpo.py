"""Odds ratio preference optimisation, reference-free.

Hong et al. 2024, https://arxiv.org/abs/2403.07691.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from plimsoll.algorithm.inputs import LossOutput, PairValues, PreferenceLossInputs
from plimsoll.algorithm.preference import chosen_nll, preference_output
from plimsoll.config.base import PositiveFloat

_NEAREST_TO_ONE = -1e-6
"""The largest log-prob whose odds are computed; the odds of a probability of 1 are infinite."""


def loss(inputs: PreferenceLossInputs, *, beta: PositiveFloat = 0.1) -> LossOutput:
    """Return the mean over pairs of L_SFT + beta * L_OR, equation 6, where beta is called lambda.

    L_SFT is the chosen response's mean negative log-likelihood; L_OR = -log sigmoid(log odds(y_w|x)
    - log odds(y_l|x)), equation 7, with odds = P / (1 - P) and P the geometric mean of a response's
    token probabilities.
    """
    mean_logprobs = inputs.logprobs / inputs.lengths
    odds = PairValues(_log_odds(mean_logprobs.chosen_P), _log_odds(mean_logprobs.rejected_P))
    losses_P = chosen_nll(inputs) - beta * logsigmoid(odds.margin_P)
    return preference_output(losses_P, beta * mean_logprobs, inputs.pairs)


def _log_odds(logprobs_P: Tensor) -> Tensor:
    bounded_P = logprobs_P.clamp(max=_NEAREST_TO_ONE)
    return bounded_P - torch.log(-torch.expm1(bounded_P))
