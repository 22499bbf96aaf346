"""From one score per response, and the KL from the reference, to a reward per token.

Ouyang et al. 2022, https://arxiv.org/abs/2203.02155: the score at the end, the KL on the way.
"""

from __future__ import annotations

from torch import Tensor

from plimsoll.algorithm.sequences import last_tokens, nonempty


def token_rewards(
    scalar_S: Tensor, kl_L: Tensor | None, cu_loss_tokens: Tensor, coefficient: float
) -> Tensor:
    """Rewards of the learned tokens, shape [L]: the sequence's scalar at its last learned token,
    less coefficient * KL at every token.

    A sequence without learned tokens has no place for its scalar and contributes nothing.
    """
    assert cu_loss_tokens.shape == (len(scalar_S) + 1,)
    rewards_L = scalar_S.new_zeros(int(cu_loss_tokens[-1]))
    if kl_L is not None:
        rewards_L = rewards_L - coefficient * kl_L
    rewards_L[last_tokens(cu_loss_tokens)] += scalar_S[nonempty(cu_loss_tokens)]
    return rewards_L
