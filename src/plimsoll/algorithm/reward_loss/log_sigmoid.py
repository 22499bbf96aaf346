"""The Bradley-Terry likelihood of a preference.

Ouyang et al. 2022 (InstructGPT), https://arxiv.org/abs/2203.02155, equation 1, for two responses.
The margin is that of Touvron et al. 2023 (Llama 2), https://arxiv.org/abs/2307.09288, equation 2.
"""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from plimsoll.algorithm.inputs import LossOutput, RewardLossInputs
from plimsoll.algorithm.preference import preference_output


def loss(inputs: RewardLossInputs) -> LossOutput:
    """Return the mean over pairs of -log sigmoid(r(x, y_w) - r(x, y_l) - m), with the margin m."""
    ahead_P = inputs.scores.margin_P - inputs.margins_P
    return preference_output(-logsigmoid(ahead_P), inputs.scores, inputs.pairs)
