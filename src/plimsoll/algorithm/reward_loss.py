"""Reward losses: `algorithm.loss.name` of `plimsoll rm` chooses a function of this file.

    loss(inputs: RewardLossInputs, *, options) -> LossOutput

The chosen response is preferred with probability sigmoid(r(x, y_w) - r(x, y_l)); Bradley and Terry
1952, https://doi.org/10.2307/2334029.
"""

from __future__ import annotations

from torch.nn.functional import logsigmoid, softplus

from plimsoll.algorithm.inputs import LossOutput, RewardLossInputs
from plimsoll.algorithm.preference import preference_output


def log_sigmoid(inputs: RewardLossInputs) -> LossOutput:
    """Return the mean over pairs of -log sigmoid(r(x, y_w) - r(x, y_l) - m), with the margin m.

    The Bradley-Terry likelihood of a preference.

    Ouyang et al. 2022 (InstructGPT), https://arxiv.org/abs/2203.02155, equation 1, for two
    responses. The margin is that of Touvron et al. 2023 (Llama 2),
    https://arxiv.org/abs/2307.09288, equation 2.
    """
    ahead_P = inputs.scores.margin_P - inputs.margins_P
    return preference_output(-logsigmoid(ahead_P), inputs.scores, inputs.pairs)


def log_exp(inputs: RewardLossInputs) -> LossOutput:
    """Return the mean over pairs of log(1 + exp(r(x, y_l) - r(x, y_w) + m)), with the margin m.

    The loss of `log_sigmoid`, in the form of Bai et al. 2022, https://arxiv.org/abs/2204.05862.

    OpenRLHF has both forms. This form differs from `log_sigmoid` only by rounding; in OpenRLHF
    it leaves margins out.
    """
    behind_P = inputs.margins_P - inputs.scores.margin_P
    return preference_output(softplus(behind_P), inputs.scores, inputs.pairs)
