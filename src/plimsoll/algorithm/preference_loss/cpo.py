"""Contrastive preference optimisation, reference-free.

Xu et al. 2024, https://arxiv.org/abs/2401.08417.
"""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from plimsoll.algorithm.inputs import LossOutput, PreferenceLossInputs
from plimsoll.algorithm.preference import chosen_nll, preference_output
from plimsoll.config.base import NonNegativeFloat, PositiveFloat


def loss(
    inputs: PreferenceLossInputs, *, beta: PositiveFloat = 0.1, alpha: NonNegativeFloat = 1.0
) -> LossOutput:
    """Return the mean of -log sigmoid(beta log pi(y_w|x) - beta log pi(y_l|x)) + alpha * L_NLL.

    The first term is DPO with a uniform reference; the second keeps the policy near the chosen
    responses. alpha is 1 in the paper.
    L_NLL is the chosen response's mean negative log-likelihood per token, as in the authors' code;
    the paper writes the sum.
    """
    rewards = beta * inputs.logprobs
    losses_P = alpha * chosen_nll(inputs) - logsigmoid(rewards.margin_P)
    return preference_output(losses_P, rewards, inputs.pairs)
