"""The reward less the mean over the whole batch: the plainest baseline that needs no group."""

from __future__ import annotations

from plimsoll.algorithm.groups import to_tokens
from plimsoll.algorithm.inputs import AdvantageInputs, Advantages


def estimate(inputs: AdvantageInputs) -> Advantages:
    """A = r - mean of all responses of the step, at each token of a response."""
    scores_S = inputs.scores_S
    return Advantages(to_tokens(inputs, scores_S - scores_S.mean()))
