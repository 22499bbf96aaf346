"""Advantage estimators: `algorithm.advantage.name` chooses one by its name.

    estimator(inputs: AdvantageInputs, *, options) -> Advantages

Further positional parameters, such as `group_S` or `values_L`, ask for further tensors.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plimsoll.algorithm.groups import group_deviations, group_means, number_groups, to_tokens
from plimsoll.algorithm.inputs import AdvantageInputs, Advantages
from plimsoll.algorithm.sequences import (
    discounted_sums,
    last_tokens,
    sequence_of_token,
    sums,
)
from plimsoll.algorithm.sequences import whiten as whitened
from plimsoll.config.base import PositiveFloat, Probability


def reinforce(inputs: AdvantageInputs, *, gamma: Probability = 1.0) -> Advantages:
    """Return A_t = sum_k gamma^k r_{t+k} at each token t; the sum goes to the response's end.

    The return itself, without a baseline; Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    return Advantages(discounted_sums(inputs.rewards_L, inputs.cu_loss_tokens, gamma))


def batch_mean(inputs: AdvantageInputs) -> Advantages:
    """Return A = r - mean of all responses of the step, at each token of a response.

    The reward minus the mean reward of the batch: the simplest baseline without groups.
    """
    one_group_S = torch.zeros_like(inputs.scores_S)
    return Advantages(to_tokens(inputs, _above_mean(inputs, one_group_S)))


def _above_mean(inputs: AdvantageInputs, group_S: Tensor) -> Tensor:
    """Return how far each response's reward lies above the mean of its group."""
    scores_S = inputs.scores_S
    return scores_S - group_means(scores_S, group_S)


def remax(inputs: AdvantageInputs, greedy_S: Tensor) -> Advantages:
    """Return A = r - r of the greedy response to the same prompt, at each token of a response.

    The reward of the greedy response as the baseline (ReMax).

    Li et al. 2024, https://arxiv.org/abs/2310.10505, algorithm 1.
    """
    return Advantages(to_tokens(inputs, inputs.scores_S - greedy_S))


def grpo(inputs: AdvantageInputs, group_S: Tensor, *, delta: PositiveFloat = 1e-6) -> Advantages:
    """Return A = (r - mean of the group) / (standard deviation of the group + delta).

    Group relative advantages; Shao et al. 2024, https://arxiv.org/abs/2402.03300, section
    4.1.2.

    Each token of a response has the response's A. The standard deviation is the one with n - 1.
    Several rewards are summed, then normalised. A group whose rewards are all equal has A = 0.
    """
    deviations_S = group_deviations(inputs.scores_S, group_S)
    return Advantages(to_tokens(inputs, _above_mean(inputs, group_S) / (deviations_S + delta)))


def dr_grpo(inputs: AdvantageInputs, group_S: Tensor) -> Advantages:
    """Return A = r - mean of the group, at each token of a response.

    Group relative advantages without the division by the standard deviation (Dr. GRPO).

    The division favours prompts that are nearly always or nearly never solved. Liu et al. 2025,
    https://arxiv.org/abs/2503.20783, section 3.2.
    """
    return Advantages(to_tokens(inputs, _above_mean(inputs, group_S)))


def rloo(inputs: AdvantageInputs, group_S: Tensor, *, whole: bool = False) -> Advantages:
    """Return A = r - mean of the group's other responses = (r - mean of the group) * n / (n - 1).

    Leave one out (RLOO); Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 2.4.

    A = 0 for a response that is alone in its group. With `whole`, r includes the shaping (such as
    minus the KL) of all tokens of the response, as in the paper, where a response is one action.
    Otherwise each token's A also gets the sum of the shaping from that token to the end.
    """
    scores_S, shaping_L = inputs.scores_S, inputs.shaping_L
    if whole:
        scores_S = scores_S + sums(shaping_L.double(), inputs.cu_loss_tokens)
        inputs = replace(inputs, shaping_L=shaping_L.new_zeros(shaping_L.shape))
    number_S, sizes = number_groups(group_S)
    factors = sizes / (sizes - 1).clamp(min=1)
    from_mean_S = scores_S - group_means(scores_S, group_S)
    return Advantages(to_tokens(inputs, from_mean_S * factors[number_S]))


def gdpo(inputs: AdvantageInputs, group_S: Tensor, *, delta: PositiveFloat = 1e-6) -> Advantages:
    """Return the weighted sum of normalised reward parts, normalised over the batch.

    Several rewards, each normalised by itself and then summed (GDPO).

    Liu et al. 2026, https://arxiv.org/abs/2601.05242.

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


def reinforce_pp(inputs: AdvantageInputs, *, gamma: Probability = 1.0) -> Advantages:
    """Return each token's A: its discounted return, whitened over all learned tokens of the batch.

    REINFORCE++; Hu et al. 2025, https://arxiv.org/abs/2501.03262.

    `sequences.whiten` does the whitening.
    """
    returns_L = discounted_sums(inputs.rewards_L, inputs.cu_loss_tokens, gamma)
    return Advantages(whitened(returns_L))


def reinforce_pp_baseline(inputs: AdvantageInputs, group_S: Tensor) -> Advantages:
    """Return A = r - mean of the group at each token, whitened over all action tokens of the batch.

    REINFORCE++ with the group's mean as its baseline.

    Hu et al. 2025, https://arxiv.org/abs/2501.03262.

    `sequences.whiten` does the whitening.
    """
    return Advantages(whitened(to_tokens(inputs, _above_mean(inputs, group_S))))


def gae(
    inputs: AdvantageInputs,
    values_L: Tensor,
    *,
    gamma: Probability = 1.0,
    gae_lambda: Probability = 0.95,
    whiten: bool = True,
) -> Advantages:
    """Return advantages by equation 16 of the paper, token by token.

    Generalised advantage estimation; Schulman et al. 2016, https://arxiv.org/abs/1506.02438.

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * gae_lambda * A_{t+1}.

    The value after a sequence's last learned token is 0: an episode ends there, whether the
    response stopped by itself or was cut. Returns are advantages + values, before whitening.
    `whiten` shifts and scales the batch's advantages to mean 0 and standard deviation 1.
    """
    next_values_L = values_L.roll(-1)
    next_values_L[last_tokens(inputs.cu_loss_tokens)] = 0.0
    deltas_L = inputs.rewards_L + gamma * next_values_L - values_L
    advantages_L = discounted_sums(deltas_L, inputs.cu_loss_tokens, gamma * gae_lambda)
    returns_L = advantages_L + values_L
    return Advantages(whitened(advantages_L) if whiten else advantages_L, returns_L)


def gae_turns(
    inputs: AdvantageInputs,
    values_L: Tensor,
    turn_L: Tensor,
    *,
    gamma: Probability = 1.0,
    gae_lambda: Probability = 0.95,
    whiten: bool = True,
) -> Advantages:
    """Return advantages of turns, at each token of a turn.

    Generalised advantage estimation over turns: a turn of an episode is one action.

    Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16, with turns in place of
    tokens.

    With V_k the value at the first token of turn k, and r_k the sum of its tokens' rewards:

    delta_k = r_k + gamma * V_{k+1} - V_k;  A_k = delta_k + gamma * gae_lambda * A_{k+1}.

    Each token of turn k has the advantage A_k, and the return A_k + V_k. The value after an
    episode's last turn is 0. So both discounts count turns, however long they are. `turn_L` is the
    number of each token's turn in its episode; `whiten` works as in `gae`.
    """
    sequence_L = sequence_of_token(inputs.cu_loss_tokens, len(values_L))
    first_L = torch.ones_like(turn_L, dtype=torch.bool)
    first_L[1:] = (turn_L.diff() != 0) | (sequence_L.diff() != 0)
    starts_K = first_L.nonzero()[:, 0]
    cu_tokens = torch.cat([starts_K, starts_K.new_tensor([len(values_L)])])  # of turns, [K + 1]
    turns_S = torch.bincount(sequence_L[starts_K], minlength=len(inputs.cu_loss_tokens) - 1)
    cu_turns = torch.cat([turns_S.new_zeros(1), turns_S.cumsum(0)])  # of sequences, [S + 1]
    turns = replace(
        inputs,
        parts_SR=torch.zeros_like(inputs.parts_SR),  # they are in the sums already
        shaping_L=sums(inputs.rewards_L, cu_tokens),
        cu_loss_tokens=cu_turns,
        placed_L=None,
    )
    values_K, turn_of_L = values_L[starts_K], first_L.cumsum(0) - 1
    by_turn = gae(turns, values_K, gamma=gamma, gae_lambda=gae_lambda, whiten=False)
    advantages_L = by_turn.advantages_L[turn_of_L]
    returns_L = (by_turn.advantages_L + values_K)[turn_of_L]
    return Advantages(whitened(advantages_L) if whiten else advantages_L, returns_L)
