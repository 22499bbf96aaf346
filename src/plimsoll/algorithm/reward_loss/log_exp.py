"""The loss of `log_sigmoid`, in the form of Bai et al. 2022, https://arxiv.org/abs/2204.05862.

OpenRLHF has both forms. This form differs from `log_sigmoid` only by rounding; in OpenRLHF it
leaves margins out.
"""

from __future__ import annotations

from torch.nn.functional import softplus

from plimsoll.algorithm.inputs import LossOutput, RewardLossInputs
from plimsoll.algorithm.preference import preference_output


def loss(inputs: RewardLossInputs) -> LossOutput:
    """Return the mean over pairs of log(1 + exp(r(x, y_l) - r(x, y_w) + m)), with the margin m."""
    behind_P = inputs.margins_P - inputs.scores.margin_P
    return preference_output(softplus(behind_P), inputs.scores, inputs.pairs)
