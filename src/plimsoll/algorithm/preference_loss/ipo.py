"""Identity preference optimisation; Azar et al. 2023, https://arxiv.org/abs/2310.12036."""

from __future__ import annotations

from plimsoll.algorithm.inputs import LossOutput, PairValues, PreferenceLossInputs
from plimsoll.algorithm.preference import preference_output
from plimsoll.config.base import PositiveFloat


def loss(
    inputs: PreferenceLossInputs,
    reference: PairValues,
    *,
    beta: PositiveFloat = 0.1,
    length_normalised: bool = False,
) -> LossOutput:
    """Return the mean over pairs of (h - 1 / (2 beta))^2, equation 17, where beta is called tau.

    h = log(pi(y_w|x) / ref(y_w|x)) - log(pi(y_l|x) / ref(y_l|x)); `length_normalised` divides each
    log-ratio by the response's tokens, as TRL does.
    """
    logratios = inputs.logprobs - reference
    if length_normalised:
        logratios = logratios / inputs.lengths
    losses_P = (logratios.margin_P - 1 / (2 * beta)).square()
    return preference_output(losses_P, beta * logratios, inputs.pairs)
