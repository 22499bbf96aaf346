"""The same likelihood as `log_sigmoid`, written as Bai et al. 2022 write it,
https://arxiv.org/abs/2204.05862; OpenRLHF has both forms.

It differs from `log_sigmoid` by rounding alone. OpenRLHF's leaves margins out; this one does not.
"""

from __future__ import annotations

from torch.nn.functional import softplus

from plimsoll.algorithm.inputs import LossOutput, RewardLossInputs
from plimsoll.algorithm.preference import preference_output


def loss(inputs: RewardLossInputs) -> LossOutput:
    """The mean over pairs of log(1 + exp(r(x, y_l) - r(x, y_w) + m)), with the pair's margin m."""
    behind_P = inputs.margins_P - inputs.scores.margin_P
    return preference_output(softplus(behind_P), inputs.scores, inputs.pairs)
