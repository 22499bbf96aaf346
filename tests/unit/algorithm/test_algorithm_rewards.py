"""Token rewards and whitening."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.algorithm.sequences import token_rewards, whiten

torch.set_num_threads(1)

NUMBERS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=20)


def test_token_rewards_by_hand() -> None:
    # sequences of 2, 0 and 1 tokens; the empty one's scalar (7) goes nowhere
    shaping_L = torch.tensor([-0.05, 0.1, -0.25])
    found = token_rewards(torch.tensor([1.0, 7.0, 3.0]), shaping_L, torch.tensor([0, 2, 2, 3]))
    assert found.tolist() == pytest.approx([-0.05, 1.1, 2.75])
    assert shaping_L.tolist() == pytest.approx([-0.05, 0.1, -0.25])


def test_token_rewards_without_shaping() -> None:
    cu_loss_tokens = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    found = token_rewards(torch.tensor([1.0, 7.0, 3.0]), torch.zeros(3), cu_loss_tokens)
    assert found.tolist() == [0, 1, 3]


def test_token_rewards_of_only_empty_sequences() -> None:
    found = token_rewards(torch.tensor([1.0, 2.0]), torch.zeros(0), torch.tensor([0, 0, 0]))
    assert found.shape == (0,)


def test_whiten_by_hand() -> None:
    # mean 2.5, variance (2.25 + 0.25 + 0.25 + 2.25) / 4 = 1.25, standard deviation 1.118034
    values_L = torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected = [-1.341641, -0.447214, 0.447214, 1.341641]
    assert whiten(values_L).tolist() == pytest.approx(expected, abs=1e-5)


@given(NUMBERS)
def test_whitened_values_have_mean_zero_and_deviation_one(numbers: list[float]) -> None:
    values_L = torch.tensor(numbers, dtype=torch.float64)
    whitened_L = whiten(values_L)
    variance = values_L.var(correction=0).item()
    assert whitened_L.mean().item() == pytest.approx(0, abs=1e-6)
    assert whitened_L.var(correction=0).item() == pytest.approx(
        variance / (variance + 1e-8), abs=1e-6
    )


@given(NUMBERS)
def test_whitening_keeps_the_order(numbers: list[float]) -> None:
    values_L = torch.tensor(numbers, dtype=torch.float64)
    assert (whiten(values_L[values_L.argsort()]).diff() >= 0).all()


def test_values_that_are_all_alike_become_zero() -> None:
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]
    assert whiten(torch.full((5,), 2.0)).tolist() == [0.0] * 5


def test_no_values_give_no_values_and_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert whiten(torch.zeros(0)).shape == (0,)
