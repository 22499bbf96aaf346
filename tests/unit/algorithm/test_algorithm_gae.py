"""Generalised advantage estimation against hand-computed numbers and a plain loop."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.algorithm.advantage import gae as estimate
from plimsoll.algorithm.inputs import AdvantageInputs, Advantages
from plimsoll.algorithm.sequences import last_tokens, sequence_of_token, whiten

torch.set_num_threads(1)

Sequence = list[tuple[float, float]]  # (reward, value) of each learned token
NUMBER = st.floats(-10, 10)
BATCH = st.lists(st.lists(st.tuples(NUMBER, NUMBER), max_size=6), min_size=1, max_size=5)


def inputs(batch: list[Sequence]) -> AdvantageInputs:
    """The rewards of tokens, as shaping: the score of every response is 0."""
    rewards = [reward for sequence in batch for reward, _ in sequence]
    return AdvantageInputs(
        parts_SR=torch.zeros(len(batch), 1, dtype=torch.float64),
        weights_R=torch.ones(1, dtype=torch.float64),
        shaping_L=torch.tensor(rewards, dtype=torch.float64),
        cu_loss_tokens=torch.tensor([0, *itertools.accumulate(len(s) for s in batch)]).int(),
    )


def values(batch: list[Sequence]) -> torch.Tensor:
    return torch.tensor([v for sequence in batch for _, v in sequence], dtype=torch.float64)


def plain(batch: list[Sequence], **options: float) -> Advantages:
    return estimate(inputs(batch), values(batch), whiten=False, **options)


def returns_of(found: Advantages) -> list[float]:
    assert found.returns_L is not None
    return found.returns_L.tolist()


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
    found = plain(batch, gamma=0.9, gae_lambda=0.5)
    # deltas: 0.9 * 0.6 - 0.5 = 0.04, 0.9 * 0.7 - 0.6 = 0.03, 1 - 0.7 = 0.3; then 2 - 1.5 = 0.5
    # advantages, with 0.9 * 0.5 = 0.45: 0.3; 0.03 + 0.45 * 0.3 = 0.165; 0.04 + 0.45 * 0.165
    assert found.advantages_L.tolist() == pytest.approx([0.11425, 0.165, 0.3, 0.5])
    assert returns_of(found) == pytest.approx([0.61425, 0.765, 1.0, 2.0])


@given(BATCH, st.floats(0, 1), st.floats(0, 1))
def test_equals_the_plain_loop(batch: list[Sequence], gamma: float, gae_lambda: float) -> None:
    found = plain(batch, gamma=gamma, gae_lambda=gae_lambda)
    expected = loop(batch, gamma, gae_lambda)
    assert found.advantages_L.tolist() == pytest.approx(expected, abs=1e-9)
    assert returns_of(found) == pytest.approx(
        [a + v for a, v in zip(expected, values(batch).tolist(), strict=True)], abs=1e-9
    )


@given(BATCH, st.floats(0, 1))
def test_lambda_one_is_the_discounted_return_less_the_value(
    batch: list[Sequence], gamma: float
) -> None:
    found = plain(batch, gamma=gamma, gae_lambda=1.0)
    returns = [
        sum(gamma**k * reward for k, (reward, _) in enumerate(sequence[t:]))
        for sequence in batch
        for t in range(len(sequence))
    ]
    assert returns_of(found) == pytest.approx(returns, abs=1e-8)


@given(BATCH, st.floats(0, 1))
def test_lambda_zero_is_the_td_error(batch: list[Sequence], gamma: float) -> None:
    found = plain(batch, gamma=gamma, gae_lambda=0.0)
    errors = []
    for sequence in batch:
        next_values = [*(value for _, value in sequence), 0.0][1:]
        for (reward, value), next_value in zip(sequence, next_values, strict=True):
            errors.append(reward + gamma * next_value - value)
    assert found.advantages_L.tolist() == pytest.approx(errors, abs=1e-9)


def test_the_inputs_are_left_as_they_were() -> None:
    batch = [[(1.0, 0.5), (2.0, 0.25)]]
    given_inputs, values_L = inputs(batch), values(batch)
    estimate(given_inputs, values_L)
    assert given_inputs.shaping_L.tolist() == [1.0, 2.0]
    assert values_L.tolist() == [0.5, 0.25]


def test_whitening_is_an_option_and_leaves_the_returns() -> None:
    batch = [[(0.0, 0.5), (1.0, 0.7)], [(2.0, 1.5)]]
    raw, white = plain(batch), estimate(inputs(batch), values(batch))
    torch.testing.assert_close(white.advantages_L, whiten(raw.advantages_L))
    assert returns_of(white) == returns_of(raw)


def test_where_the_sequences_lie() -> None:
    cu_loss_tokens = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert last_tokens(cu_loss_tokens).tolist() == [1, 4]
    assert sequence_of_token(cu_loss_tokens, 5).tolist() == [0, 0, 2, 2, 2]
