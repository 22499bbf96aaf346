"""A mixture: shares, orders and epochs of its sources, equal from any position."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.data.order import Ascending, DataOrder, MixedOrder, Portion

WEIGHTS = st.floats(0.01, 100)
PORTIONS = st.lists(st.tuples(st.integers(1, 20), WEIGHTS), min_size=1, max_size=5).map(
    lambda pairs: tuple(Portion(f"s{i}", rows, w) for i, (rows, w) in enumerate(pairs))
)
ORDERS = st.builds(MixedOrder, PORTIONS, st.integers(0, 2**32), st.booleans())


def by_source(order: MixedOrder, indices: list[int]) -> list[list[int]]:
    """Return the rows of each source among these, numbered within the source, in their order."""
    by_portion: list[list[int]] = []
    first = 0
    for portion in order.portions:
        portion_rows = range(first, first + portion.rows)
        by_portion.append([i - first for i in indices if i in portion_rows])
        first += portion.rows
    return by_portion


def test_turns_worked_out_by_hand() -> None:
    """The weights 2, 1 and 1 make draws due at 1/4, 3/4, ..., and twice at 1/2, 3/2, ... If two
    draws are due at the same time, the first source's comes first."""
    order = MixedOrder((Portion("a", 4, 2.0), Portion("b", 2, 1.0), Portion("c", 3, 1.0)), 0, False)
    assert order.indices(0, 12).tolist() == [0, 4, 6, 1, 2, 5, 7, 3, 0, 4, 8, 1]
    assert order.epochs(6) == {"a": 3 / 4, "b": 2 / 2, "c": 1 / 3}


def test_sources_with_numbers_keep_their_turns_and_begin_again_with_the_lowest() -> None:
    portions = (
        Portion("a", 3, 2.0, Ascending(np.array([2.0, 0.0, 1.0]))),
        Portion("b", 2, 1.0),
    )
    order = MixedOrder(portions, 0, False)
    assert by_source(order, order.indices(0, 9).tolist()) == [[1, 2, 0, 1, 2, 0], [0, 1, 0]]
    plain = MixedOrder((Portion("a", 3, 2.0), Portion("b", 2, 1.0)), 0, False)
    turns = [row < 3 for row in plain.indices(0, 9)]
    assert [row < 3 for row in order.indices(0, 9)] == turns


def test_the_shuffled_order_of_a_mixture_never_changes() -> None:
    order = MixedOrder((Portion("a", 4, 3.0), Portion("b", 4, 1.0)), 1, True)
    assert order.indices(0, 16).tolist() == [2, 0, 7, 3, 1, 3, 5, 0, 2, 1, 4, 3, 2, 1, 6, 0]


@given(ORDERS, st.integers(0, 300), st.lists(st.integers(0, 40), max_size=5))
def test_any_cut_gives_the_same_order(order: MixedOrder, start: int, counts: list[int]) -> None:
    whole = order.indices(0, start + sum(counts)).tolist()
    position = start
    for count in counts:
        assert order.indices(position, count).tolist() == whole[position : position + count]
        position += count


@given(ORDERS, st.integers(1, 400))
def test_shares_follow_the_weights_at_every_position(order: MixedOrder, position: int) -> None:
    drawn = by_source(order, order.indices(0, position).tolist())
    total = sum(portion.weight for portion in order.portions)
    for portion, rows_drawn in zip(order.portions, drawn, strict=True):
        wanted = position * portion.weight / total
        assert abs(len(rows_drawn) - wanted) < (len(order.portions) + 1) / 2
        assert order.epochs(position)[portion.name] == len(rows_drawn) / portion.rows


@given(ORDERS)
def test_each_source_keeps_its_own_order_and_epochs(order: MixedOrder) -> None:
    """A source's rows come in its own order, whatever is drawn between, each once an epoch."""
    for source, rows_drawn in enumerate(by_source(order, order.indices(0, 200).tolist())):
        rows = order.portions[source].rows
        alone = DataOrder(rows, order.seed, order.shuffle, source)
        assert rows_drawn == alone.indices(0, len(rows_drawn)).tolist()
        for epoch in range(len(rows_drawn) // rows):
            assert Counter(rows_drawn[epoch * rows : (epoch + 1) * rows]) == Counter(range(rows))


@given(st.integers(1, 40), st.integers(0, 2**32), st.integers(0, 100), st.integers(0, 50))
def test_one_source_is_a_plain_order(rows: int, seed: int, start: int, count: int) -> None:
    mixed = MixedOrder((Portion("", rows, 7.0),), seed, True).indices(start, count)
    assert mixed.tolist() == DataOrder(rows, seed, True).indices(start, count).tolist()


def test_sources_of_one_length_are_not_shuffled_alike() -> None:
    order = MixedOrder((Portion("a", 50, 1.0), Portion("b", 50, 1.0)), 3, True)
    a, b = by_source(order, order.indices(0, 100).tolist())
    assert a != b


def test_far_positions_are_found_without_drawing() -> None:
    """A billion draws of weights 3 and 1 lose no precision."""
    order = MixedOrder((Portion("a", 1_000, 3.0), Portion("b", 1_000, 1.0)), 0, False)
    far = 10**9
    assert order.indices(far, 8).tolist() == order.indices(0, 8).tolist()
    assert order.epochs(far) == {"a": pytest.approx(0.75e6), "b": pytest.approx(0.25e6)}
