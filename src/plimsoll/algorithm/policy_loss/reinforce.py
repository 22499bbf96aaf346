"""The plain policy gradient; Williams 1992, https://doi.org/10.1007/BF00992696."""

from __future__ import annotations

from plimsoll.algorithm.inputs import PolicyLossInputs, TokenLoss


def loss(inputs: PolicyLossInputs) -> TokenLoss:
    """Return -A * log-prob of each token.

    It knows no old policy, so a step should have one update.
    """
    return TokenLoss(-inputs.advantages_L * inputs.logprobs_L, {})
