"""Several rewards, each normalised by itself and then summed (GDPO).

Liu et al. 2026, https://arxiv.org/abs/2601.05242.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plimsoll.algorithm.groups import group_deviations, group_means, to_tokens
from plimsoll.algorithm.inputs import AdvantageInputs, Advantages
from plimsoll.config.base import PositiveFloat


def estimate(
    inputs: AdvantageInputs, group_S: Tensor, *, delta: PositiveFloat = 1e-6
) -> Advantages:
    """Return the weighted sum of normalised reward parts, normalised over the batch.

    Each part is first normalised within its group, as `grpo` does. The sum is shifted and scaled
    over the responses of the batch to mean 0 and standard deviation 1 (with n - 1, and delta
    added).
    """
    normalised = [
        (part_S - group_means(part_S, group_S)) / (group_deviations(part_S, group_S) + delta)
        for part_S in inputs.parts_SR.unbind(1)
    ]
    sums_S = (torch.stack(normalised, 1) * inputs.weights_R).sum(1)
    spread = sums_S.std() if len(sums_S) > 1 else sums_S.new_zeros(())
    return Advantages(to_tokens(inputs, (sums_S - sums_S.mean()) / (spread + delta)))
