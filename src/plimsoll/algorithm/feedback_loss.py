"""Losses on single responses that are good or bad by themselves.

`algorithm.loss.name` of `plimsoll kto` chooses a function of this file by its name:

    loss(inputs: FeedbackLossInputs, *, options) -> LossOutput
"""

from __future__ import annotations

import torch

from plimsoll.algorithm.feedback import feedback_output
from plimsoll.algorithm.inputs import FeedbackLossInputs, LossOutput
from plimsoll.config.base import NonNegativeFloat, PositiveFloat


def kto(
    inputs: FeedbackLossInputs,
    *,
    beta: PositiveFloat = 0.1,
    desirable_weight: NonNegativeFloat = 1.0,
    undesirable_weight: NonNegativeFloat = 1.0,
) -> LossOutput:
    """Return the mean over responses of lambda_y - v(x, y), equation 8.

    Kahneman-Tversky optimisation; Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306.

    With the log-ratio r = log(pi(y|x) / ref(y|x)) and the reference point z = `inputs.kl`:

    v = lambda_D sigmoid(beta (r - z)) of a desirable response,
    v = lambda_U sigmoid(beta (z - r)) of an undesirable one.

    lambda_D and lambda_U are the weights of the two labels. If the data has n_D desirable and n_U
    undesirable responses, lambda_D n_D / (lambda_U n_U) should be 1 or little more.
    """
    gain_S = inputs.logratios_S - inputs.kl
    value_S = torch.where(
        inputs.desirable_S,
        desirable_weight * torch.sigmoid(beta * gain_S),
        undesirable_weight * torch.sigmoid(-beta * gain_S),
    )
    weight_S = torch.where(inputs.desirable_S, desirable_weight, undesirable_weight)
    return feedback_output(weight_S - value_S, beta * inputs.logratios_S, inputs)
