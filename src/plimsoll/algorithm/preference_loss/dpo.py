"""Direct preference optimisation; Rafailov et al. 2023, https://arxiv.org/abs/2305.18290.

Label smoothing is cDPO: Mitchell 2023, "A note on DPO with noisy preferences & relationship to
IPO", https://ericmitchell.ai/cdpo.pdf. The length-normalised variant is that of Lambert et al.
2024 (Tulu 3), https://arxiv.org/abs/2411.15124, section 5.1.
"""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from plimsoll.algorithm.inputs import LossOutput, PairValues, PreferenceLossInputs
from plimsoll.algorithm.preference import preference_output
from plimsoll.config.base import FlipRate, PositiveFloat


def loss(
    inputs: PreferenceLossInputs,
    reference: PairValues,
    *,
    beta: PositiveFloat = 0.1,
    label_smoothing: FlipRate = 0.0,
    length_normalised: bool = False,
) -> LossOutput:
    """Return the mean over pairs of -log sigmoid(m), equation 7.

    The margin is m = beta * (log(pi(y_w|x) / ref(y_w|x)) - log(pi(y_l|x) / ref(y_l|x))). With
    `label_smoothing` e, the share of pairs whose labels are taken to be flipped, it is the mean of
    -(1 - e) log sigmoid(m) - e log sigmoid(-m). `length_normalised` divides each log-ratio by the
    response's tokens; beta is then larger, 5 say.
    """
    logratios = inputs.logprobs - reference
    rewards = beta * (logratios / inputs.lengths if length_normalised else logratios)
    margin_P = rewards.margin_P
    losses_P = (label_smoothing - 1) * logsigmoid(margin_P) - label_smoothing * logsigmoid(
        -margin_P
    )
    return preference_output(losses_P, rewards, inputs.pairs)
