"""Advantages of turns against hand-computed numbers, and against tokens where each is a turn."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.algorithm.advantage import gae
from plimsoll.algorithm.advantage import gae_turns as estimate
from plimsoll.algorithm.inputs import AdvantageInputs

NUMBER = st.floats(-10, 10)
BATCH = st.lists(
    st.lists(st.tuples(NUMBER, NUMBER, st.integers(0, 1)), max_size=6), min_size=1, max_size=4
)


def inputs(placed: list[float], scores: list[float], lengths: list[int]) -> AdvantageInputs:
    return AdvantageInputs(
        parts_SR=torch.tensor([[score] for score in scores], dtype=torch.float64),
        weights_R=torch.ones(1, dtype=torch.float64),
        shaping_L=torch.zeros(len(placed)),
        cu_loss_tokens=torch.tensor([0, *itertools.accumulate(lengths)]).int(),
        placed_L=torch.tensor(placed),
    )


def test_two_turns_and_one_by_hand() -> None:
    """An episode of two turns (2 tokens, then 1), rewarded 1 and 2; another of one, rewarded 4.

    With gamma 0.5 and lambda 0.5: delta_1 = 1 + 0.5 * 3 - 2 = 0.5; delta_2 = 2 - 3 = -1;
    A_2 = -1; A_1 = 0.5 + 0.25 * -1 = 0.25. The other: 4 - 1 = 3.
    """
    found = estimate(
        inputs([0.0, 1.0, 2.0, 0.0, 0.0], [3.0, 4.0], [3, 2]),
        torch.tensor([2.0, 9.0, 3.0, 1.0, 9.0]),
        torch.tensor([0, 0, 2, 0, 0]),
        gamma=0.5,
        gae_lambda=0.5,
        whiten=False,
    )
    assert found.advantages_L.tolist() == [0.25, 0.25, -1.0, 3.0, 3.0]
    assert found.returns_L is not None
    assert found.returns_L.tolist() == [2.25, 2.25, 2.0, 4.0, 4.0]


@given(BATCH)
def test_where_each_token_is_a_turn_it_is_gae(batch: list[list[tuple[float, float, int]]]) -> None:
    tokens = [token for sequence in batch for token in sequence]
    values = torch.tensor([value for _, value, _ in tokens])
    placed = [reward for reward, _, _ in tokens]
    own = inputs(placed, [sum(r for r, _, _ in s) for s in batch], [len(s) for s in batch])
    turns = torch.tensor([i for sequence in batch for i in range(len(sequence))])
    found = estimate(own, values, turns, whiten=False)
    expected = gae(own, values, whiten=False)
    torch.testing.assert_close(found.advantages_L, expected.advantages_L, atol=1e-3, rtol=1e-4)
    assert found.returns_L is not None and expected.returns_L is not None
    torch.testing.assert_close(found.returns_L, expected.returns_L, atol=1e-3, rtol=1e-4)


@given(BATCH)
def test_a_turn_has_one_advantage(batch: list[list[tuple[float, float, int]]]) -> None:
    tokens = [token for sequence in batch for token in sequence]
    turns = [
        number
        for sequence in batch
        for number in itertools.accumulate(new for _, _, new in sequence)
    ]
    own = inputs([r for r, _, _ in tokens], [0.0] * len(batch), [len(s) for s in batch])
    values = torch.tensor([value for _, value, _ in tokens])
    found = estimate(own, values, torch.tensor(turns, dtype=torch.int64), whiten=False)
    sequences = [i for i, sequence in enumerate(batch) for _ in sequence]
    by_turn: dict[tuple[int, int], set[float]] = {}
    for sequence, turn, advantage in zip(
        sequences, turns, found.advantages_L.tolist(), strict=True
    ):
        by_turn.setdefault((sequence, turn), set()).add(advantage)
    assert all(len(own) == 1 for own in by_turn.values())


def test_what_an_environment_placed_is_not_given_again_at_the_end() -> None:
    own = inputs([0.0, 1.0, 0.0, 2.0], [3.5, 2.0], [3, 1])
    assert own.rewards_L.tolist() == pytest.approx([0.0, 1.0, 2.5, 2.0])
