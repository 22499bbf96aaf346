"""Robust DPO; Chowdhury et al. 2024, https://arxiv.org/abs/2403.00409."""

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
    flip_rate: FlipRate = 0.1,
) -> LossOutput:
    """Return the mean over pairs of ((1 - e) L(m) - e L(-m)) / (1 - 2e), with DPO's margin m.

    L(m) is -log sigmoid(m), DPO's loss (see dpo.py), and e is `flip_rate`, the share of pairs with
    the wrong label. If labels are flipped at that rate, the expectation is DPO's loss on the right
    labels; it may be negative for single pairs.
    """
    rewards = beta * (inputs.logprobs - reference)
    margin_P = rewards.margin_P
    right_P, flipped_P = -logsigmoid(margin_P), -logsigmoid(-margin_P)
    losses_P = ((1 - flip_rate) * right_P - flip_rate * flipped_P) / (1 - 2 * flip_rate)
    return preference_output(losses_P, rewards, inputs.pairs)
