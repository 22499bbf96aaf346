"""From one score per response, and what shapes it token by token, to a reward per token.

Ouyang et al. 2022, https://arxiv.org/abs/2203.02155: the score at the end, the KL on the way.
"""

from __future__ import annotations

from torch import Tensor

from plimsoll.algorithm.sequences import last_tokens, nonempty


def token_rewards(scores_S: Tensor, shaping_L: Tensor, cu_loss_tokens: Tensor) -> Tensor:
    """Rewards of the learned tokens, shape [L]: the sequence's score at its last learned token,
    and the shaping at every token.

    A sequence without learned tokens has no place for its score and contributes nothing.
    """
    assert cu_loss_tokens.shape == (len(scores_S) + 1,)
    rewards_L = shaping_L.clone()
    rewards_L[last_tokens(cu_loss_tokens)] += scores_S[nonempty(cu_loss_tokens)]
    return rewards_L
