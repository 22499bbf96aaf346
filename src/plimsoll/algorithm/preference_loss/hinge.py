"""The hinge loss of SLiC-HF; Zhao et al. 2023, https://arxiv.org/abs/2305.10425.

It takes log-ratios to the reference, as Liu et al. 2023 (RSO) do, https://arxiv.org/abs/2309.06657;
SLiC-HF itself takes the policy's log-probs alone.
"""

from __future__ import annotations

from torch.nn.functional import relu

from plimsoll.algorithm.inputs import LossOutput, PairValues, PreferenceLossInputs
from plimsoll.algorithm.preference import preference_output
from plimsoll.config.base import PositiveFloat


def loss(
    inputs: PreferenceLossInputs, reference: PairValues, *, beta: PositiveFloat = 0.1
) -> LossOutput:
    """Return the mean over pairs of max(0, 1 - m), with DPO's margin m (see dpo.py).

    A pair with a margin of 1 or more has no gradient.
    """
    rewards = beta * (inputs.logprobs - reference)
    return preference_output(relu(1 - rewards.margin_P), rewards, inputs.pairs)
