"""The order of rows is a pure function of the position."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.data.order import Ascending, DataOrder

ROWS = st.integers(1, 40)
SEEDS = st.integers(0, 2**32)


def test_without_shuffle_the_rows_come_as_they_are_again_and_again() -> None:
    order = DataOrder(rows=3, seed=0, shuffle=False)
    assert order.indices(2, 6).tolist() == [2, 0, 1, 2, 0, 1]
    assert order.indices(2, 6).dtype == np.int64


def test_the_shuffled_order_never_changes() -> None:
    """A run that an older Plimsoll started resumes with the same rows."""
    indices = DataOrder(rows=8, seed=1, shuffle=True).indices(0, 16)
    assert indices[:8].tolist() == [2, 4, 7, 5, 0, 6, 3, 1]
    assert indices[8:].tolist() == [5, 6, 3, 0, 7, 2, 1, 4]


def test_each_epoch_goes_from_the_lowest_number_to_the_highest() -> None:
    by = Ascending(np.array([3.0, 1.0, 2.0, 1.0, -0.5]))
    plain = DataOrder(5, seed=0, shuffle=False, by=by)
    assert plain.indices(0, 12).tolist() == [4, 1, 3, 2, 0, 4, 1, 3, 2, 0, 4, 1]
    shuffled = DataOrder(5, seed=0, shuffle=True, by=by).indices(0, 500).reshape(100, 5)
    assert {tuple(epoch) for epoch in shuffled.tolist()} == {(4, 1, 3, 2, 0), (4, 3, 1, 2, 0)}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), SEEDS, st.integers(0, 3))
def test_rows_of_one_number_come_as_they_would_without(
    numbers: list[int], seed: int, epoch: int
) -> None:
    rows = len(numbers)
    by = Ascending(np.array(numbers, dtype=np.float64))
    drawn = DataOrder(rows, seed, shuffle=True).indices(epoch * rows, rows).tolist()
    ordered = DataOrder(rows, seed, shuffle=True, by=by).indices(epoch * rows, rows).tolist()
    assert ordered == sorted(drawn, key=lambda row: numbers[row])


@given(ROWS, SEEDS, st.integers(0, 3))
def test_each_epoch_holds_every_row_once(rows: int, seed: int, epoch: int) -> None:
    indices = DataOrder(rows, seed, shuffle=True).indices(epoch * rows, rows)
    assert sorted(indices.tolist()) == list(range(rows))


@given(
    ROWS,
    SEEDS,
    st.booleans(),
    st.booleans(),
    st.integers(0, 100),
    st.lists(st.integers(0, 50), max_size=6),
)
def test_any_cut_gives_the_same_order(
    rows: int, seed: int, shuffle: bool, ordered: bool, start: int, counts: list[int]
) -> None:
    """A run that resumes, with any batch size, sees the rows that it would have seen."""
    by = Ascending(np.array([row % 3.0 for row in range(rows)])) if ordered else None
    order = DataOrder(rows, seed, shuffle, by=by)
    position, pieces = start, []
    for count in counts:
        pieces += order.indices(position, count).tolist()
        position += count
    whole = DataOrder(rows, seed, shuffle, by=by)
    assert pieces == whole.indices(start, sum(counts)).tolist()


def test_epochs_and_seeds_differ() -> None:
    order = DataOrder(rows=100, seed=0, shuffle=True)
    first, second = order.indices(0, 100).tolist(), order.indices(100, 100).tolist()
    other = DataOrder(rows=100, seed=1, shuffle=True).indices(0, 100).tolist()
    assert first != second and first != other and first != list(range(100))


def test_a_caller_cannot_spoil_the_order() -> None:
    order = DataOrder(rows=5, seed=3, shuffle=True)
    before = order.indices(0, 5).tolist()
    order.indices(0, 5)[:] = 0
    assert order.indices(0, 5).tolist() == before
