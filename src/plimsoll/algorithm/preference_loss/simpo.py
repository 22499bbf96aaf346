"""Simple preference optimisation, reference-free.

Meng et al. 2024, https://arxiv.org/abs/2405.14734.
"""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from plimsoll.algorithm.inputs import LossOutput, PreferenceLossInputs
from plimsoll.algorithm.preference import preference_output
from plimsoll.config.base import NonNegativeFloat, PositiveFloat


def loss(
    inputs: PreferenceLossInputs, *, beta: PositiveFloat = 2.0, gamma: NonNegativeFloat = 1.0
) -> LossOutput:
    """Return the mean over pairs of -log sigmoid(m - gamma), equation 6.

    The margin is m = beta / |y_w| log pi(y_w|x) - beta / |y_l| log pi(y_l|x), and gamma its target;
    the paper tunes gamma (0.3 to 1.6) with beta (2 to 2.5).
    """
    rewards = beta * (inputs.logprobs / inputs.lengths)
    return preference_output(-logsigmoid(rewards.margin_P - gamma), rewards, inputs.pairs)
