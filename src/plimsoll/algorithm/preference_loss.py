"""Preference losses: `algorithm.loss.name` chooses a function of this file by its name.

The function's parameters say whether it compares with a reference:

    loss(inputs: PreferenceLossInputs, reference: PairValues, *, options) -> LossOutput
    loss(inputs: PreferenceLossInputs, *, options) -> LossOutput           (reference-free)

reference: the responses' log-probs under the frozen reference.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from plimsoll.algorithm.inputs import LossOutput, PairValues, PreferenceLossInputs
from plimsoll.algorithm.preference import chosen_nll, preference_output
from plimsoll.config.base import FlipRate, NonNegativeFloat, PositiveFloat


def dpo(
    inputs: PreferenceLossInputs,
    reference: PairValues,
    *,
    beta: PositiveFloat = 0.1,
    label_smoothing: FlipRate = 0.0,
    length_normalised: bool = False,
) -> LossOutput:
    """Return the mean over pairs of -log sigmoid(m), equation 7.

    Direct preference optimisation; Rafailov et al. 2023, https://arxiv.org/abs/2305.18290.

    Label smoothing is cDPO: Mitchell 2023, "A note on DPO with noisy preferences & relationship
    to IPO", https://ericmitchell.ai/cdpo.pdf. The length-normalised variant is that of Lambert
    et al. 2024 (Tulu 3), https://arxiv.org/abs/2411.15124, section 5.1.

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


def robust(
    inputs: PreferenceLossInputs,
    reference: PairValues,
    *,
    beta: PositiveFloat = 0.1,
    flip_rate: FlipRate = 0.1,
) -> LossOutput:
    """Return the mean over pairs of ((1 - e) L(m) - e L(-m)) / (1 - 2e), with DPO's margin m.

    Robust DPO; Chowdhury et al. 2024, https://arxiv.org/abs/2403.00409.

    L(m) is -log sigmoid(m), DPO's loss (see `dpo`), and e is `flip_rate`, the share of pairs with
    the wrong label. If labels are flipped at that rate, the expectation is DPO's loss on the right
    labels; it may be negative for single pairs.
    """
    rewards = beta * (inputs.logprobs - reference)
    margin_P = rewards.margin_P
    right_P, flipped_P = -logsigmoid(margin_P), -logsigmoid(-margin_P)
    losses_P = ((1 - flip_rate) * right_P - flip_rate * flipped_P) / (1 - 2 * flip_rate)
    return preference_output(losses_P, rewards, inputs.pairs)


def ipo(
    inputs: PreferenceLossInputs,
    reference: PairValues,
    *,
    beta: PositiveFloat = 0.1,
    length_normalised: bool = False,
) -> LossOutput:
    """Return the mean over pairs of (h - 1 / (2 beta))^2, equation 17, where beta is called tau.

    Identity preference optimisation; Azar et al. 2023, https://arxiv.org/abs/2310.12036.

    h = log(pi(y_w|x) / ref(y_w|x)) - log(pi(y_l|x) / ref(y_l|x)); `length_normalised` divides each
    log-ratio by the response's tokens, as TRL does.
    """
    logratios = inputs.logprobs - reference
    if length_normalised:
        logratios = logratios / inputs.lengths
    losses_P = (logratios.margin_P - 1 / (2 * beta)).square()
    return preference_output(losses_P, beta * logratios, inputs.pairs)


def hinge(
    inputs: PreferenceLossInputs, reference: PairValues, *, beta: PositiveFloat = 0.1
) -> LossOutput:
    """Return the mean over pairs of max(0, 1 - m), with DPO's margin m (see `dpo`).

    The hinge loss of SLiC-HF; Zhao et al. 2023, https://arxiv.org/abs/2305.10425.

    It takes log-ratios to the reference, as Liu et al. 2023 (RSO) do,
    https://arxiv.org/abs/2309.06657; SLiC-HF itself takes the policy's log-probs alone.

    A pair with a margin of 1 or more has no gradient.
    """
    rewards = beta * (inputs.logprobs - reference)
    return preference_output(relu(1 - rewards.margin_P), rewards, inputs.pairs)


def simpo(
    inputs: PreferenceLossInputs, *, beta: PositiveFloat = 2.0, gamma: NonNegativeFloat = 1.0
) -> LossOutput:
    """Return the mean over pairs of -log sigmoid(m - gamma), equation 6.

    Simple preference optimisation, reference-free.

    Meng et al. 2024, https://arxiv.org/abs/2405.14734.

    The margin is m = beta / |y_w| log pi(y_w|x) - beta / |y_l| log pi(y_l|x), and gamma its target;
    the paper tunes gamma (0.3 to 1.6) with beta (2 to 2.5).
    """
    rewards = beta * (inputs.logprobs / inputs.lengths)
    return preference_output(-logsigmoid(rewards.margin_P - gamma), rewards, inputs.pairs)


def cpo(
    inputs: PreferenceLossInputs, *, beta: PositiveFloat = 0.1, alpha: NonNegativeFloat = 1.0
) -> LossOutput:
    """Return the mean of -log sigmoid(beta log pi(y_w|x) - beta log pi(y_l|x)) + alpha * L_NLL.

    Contrastive preference optimisation, reference-free.

    Xu et al. 2024, https://arxiv.org/abs/2401.08417.

    The first term is DPO with a uniform reference; the second keeps the policy near the chosen
    responses. alpha is 1 in the paper.
    L_NLL is the chosen response's mean negative log-likelihood per token, as in the authors' code;
    the paper writes the sum.
    """
    rewards = beta * inputs.logprobs
    losses_P = alpha * chosen_nll(inputs) - logsigmoid(rewards.margin_P)
    return preference_output(losses_P, rewards, inputs.pairs)


_NEAREST_TO_ONE = -1e-6
"""The largest log-prob whose odds are computed; the odds of a probability of 1 are infinite."""


def orpo(inputs: PreferenceLossInputs, *, beta: PositiveFloat = 0.1) -> LossOutput:
    """Return the mean over pairs of L_SFT + beta * L_OR, equation 6, where beta is called lambda.

    Odds ratio preference optimisation, reference-free.

    Hong et al. 2024, https://arxiv.org/abs/2403.07691.

    L_SFT is the chosen response's mean negative log-likelihood; L_OR = -log sigmoid(log odds(y_w|x)
    - log odds(y_l|x)), equation 7, with odds = P / (1 - P) and P the geometric mean of a response's
    token probabilities.
    """
    mean_logprobs = inputs.logprobs / inputs.lengths
    odds = PairValues(_log_odds(mean_logprobs.chosen_P), _log_odds(mean_logprobs.rejected_P))
    losses_P = chosen_nll(inputs) - beta * logsigmoid(odds.margin_P)
    return preference_output(losses_P, beta * mean_logprobs, inputs.pairs)


def _log_odds(logprobs_P: Tensor) -> Tensor:
    bounded_P = logprobs_P.clamp(max=_NEAREST_TO_ONE)
    return bounded_P - torch.log(-torch.expm1(bounded_P))
