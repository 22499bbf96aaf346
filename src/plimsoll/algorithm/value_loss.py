"""Compute the critic's loss, with PPO's clipping of the change of a value.

The clipping follows the PPO authors' code (openai/baselines, ppo2), not the paper.
"""

from __future__ import annotations

import torch

from plimsoll.algorithm.inputs import LossOutput, ValueLossInputs, token_mean


def value_loss(inputs: ValueLossInputs, clip: float | None) -> LossOutput:
    """Return half the mean over tokens of max((V - R)^2, (V_clipped - R)^2).

    V_clipped stays within `clip` of the old value; without `clip` the result is half the mean
    squared error.

    Metrics: `value_mean`; `value_clip_fraction`, the share of tokens whose clipped error is the
    larger; `value_error`, the mean squared error before clipping.
    """
    error_L = (inputs.values_L - inputs.returns_L).square()
    worst_L = error_L
    if clip is not None:
        low_L, high_L = inputs.old_values_L - clip, inputs.old_values_L + clip
        clipped_L = inputs.values_L.clamp(low_L, high_L)  # exactly the value, within the bounds
        worst_L = torch.maximum(error_L, (clipped_L - inputs.returns_L).square())
    with torch.no_grad():
        metrics = {
            "value_mean": token_mean(inputs.values_L, inputs.counts),
            "value_clip_fraction": token_mean((worst_L > error_L).float(), inputs.counts),
            "value_error": token_mean(error_L, inputs.counts),
        }
    return LossOutput(loss=0.5 * token_mean(worst_L, inputs.counts), metrics=metrics)
