"""Reward losses: every file defines one function `loss`.

    loss(inputs: RewardLossInputs, *, options) -> LossOutput

The chosen response is preferred with probability sigmoid(r(x, y_w) - r(x, y_l)); Bradley and Terry
1952, https://doi.org/10.2307/2334029.
"""
