"""Generalised advantage estimation against hand-computed numbers and a plain loop."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.algorithm.advantage.gae import estimate
from plimsoll.algorithm.inputs import AdvantageInputs
from plimsoll.algorithm.sequences import last_tokens, lengths, nonempty, sequence_of_token

torch.set_num_threads(1)

Sequence = list[tuple[float, float]]  # (reward, value) of each learned token
NUMBER = st.floats(-10, 10)
BATCH = st.lists(st.lists(st.tuples(NUMBER, NUMBER), max_size=6), min_size=1, max_size=5)


def inputs(batch: list[Sequence]) -> AdvantageInputs:
    flat = [token for sequence in batch for token in sequence]
    return AdvantageInputs(
        rewards_L=torch.tensor([reward for reward, _ in flat], dtype=torch.float64),
        values_L=torch.tensor([value for _, value in flat], dtype=torch.float64),
        cu_loss_tokens=torch.tensor([0, *itertools.accumulate(len(s) for s in batch)]).int(),
        prompt_S=torch.arange(len(batch)),
    )


def loop(batch: list[Sequence], gamma: float, gae_lambda: float) -> list[float]:
    """Equation 16, one token after another."""
    found: list[float] = []
    for sequence in batch:
        advantage = next_value = 0.0
        backwards = []
        for reward, value in reversed(sequence):
            delta = reward + gamma * next_value - value
            advantage = delta + gamma * gae_lambda * advantage
            next_value = value
            backwards.append(advantage)
        found += reversed(backwards)
    return found


def test_hand_computed() -> None:
    batch = [[(0.0, 0.5), (0.0, 0.6), (1.0, 0.7)], [], [(2.0, 1.5)]]
    found = estimate(inputs(batch), gamma=0.9, gae_lambda=0.5)
    # deltas: 0.9 * 0.6 - 0.5 = 0.04, 0.9 * 0.7 - 0.6 = 0.03, 1 - 0.7 = 0.3; then 2 - 1.5 = 0.5
    # advantages, with 0.9 * 0.5 = 0.45: 0.3; 0.03 + 0.45 * 0.3 = 0.165; 0.04 + 0.45 * 0.165
    assert found.advantages_L.tolist() == pytest.approx([0.11425, 0.165, 0.3, 0.5])
    assert found.returns_L.tolist() == pytest.approx([0.61425, 0.765, 1.0, 2.0])


@given(BATCH, st.floats(0, 1), st.floats(0, 1))
def test_equals_the_plain_loop(batch: list[Sequence], gamma: float, gae_lambda: float) -> None:
    given_inputs = inputs(batch)
    found = estimate(given_inputs, gamma=gamma, gae_lambda=gae_lambda)
    expected = loop(batch, gamma, gae_lambda)
    values = [value for sequence in batch for _, value in sequence]
    assert found.advantages_L.tolist() == pytest.approx(expected, abs=1e-9)
    assert found.returns_L.tolist() == pytest.approx(
        [a + v for a, v in zip(expected, values, strict=True)], abs=1e-9
    )


@given(BATCH, st.floats(0, 1))
def test_lambda_one_is_the_discounted_return_less_the_value(
    batch: list[Sequence], gamma: float
) -> None:
    found = estimate(inputs(batch), gamma=gamma, gae_lambda=1.0)
    returns = [
        sum(gamma**k * reward for k, (reward, _) in enumerate(sequence[t:]))
        for sequence in batch
        for t in range(len(sequence))
    ]
    assert found.returns_L.tolist() == pytest.approx(returns, abs=1e-8)


@given(BATCH, st.floats(0, 1))
def test_lambda_zero_is_the_td_error(batch: list[Sequence], gamma: float) -> None:
    found = estimate(inputs(batch), gamma=gamma, gae_lambda=0.0)
    errors = []
    for sequence in batch:
        next_values = [*(value for _, value in sequence), 0.0][1:]
        for (reward, value), next_value in zip(sequence, next_values, strict=True):
            errors.append(reward + gamma * next_value - value)
    assert found.advantages_L.tolist() == pytest.approx(errors, abs=1e-9)


def test_the_inputs_are_left_as_they_were() -> None:
    given_inputs = inputs([[(1.0, 0.5), (2.0, 0.25)]])
    estimate(given_inputs)
    assert given_inputs.rewards_L.tolist() == [1.0, 2.0]
    assert given_inputs.values_L is not None
    assert given_inputs.values_L.tolist() == [0.5, 0.25]


def test_where_the_sequences_lie() -> None:
    cu_loss_tokens = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert lengths(cu_loss_tokens).tolist() == [2, 0, 3]
    assert nonempty(cu_loss_tokens).tolist() == [True, False, True]
    assert last_tokens(cu_loss_tokens).tolist() == [1, 4]
    assert sequence_of_token(cu_loss_tokens).tolist() == [0, 0, 2, 2, 2]
