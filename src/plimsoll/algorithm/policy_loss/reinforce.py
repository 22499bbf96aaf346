"""The plain policy gradient; Williams 1992, https://doi.org/10.1007/BF00992696."""

from __future__ import annotations

from plimsoll.algorithm.inputs import PolicyLossInputs, TokenLoss


def loss(inputs: PolicyLossInputs) -> TokenLoss:
    """Return -A * log-prob of each token.

    The loss does not compare with the old policy, so a step should have a single update.
    """
    return TokenLoss(-inputs.advantages_L * inputs.logprobs_L, {})
