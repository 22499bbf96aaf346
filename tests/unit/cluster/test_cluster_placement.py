"""CPU processes on nodes; engines on the training ranks' cards: each on one node, no card twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.cluster.placement import NodeCards, order_by_node, shared_placement, spread
from plimsoll.errors import SettingsConflict


def test_cpu_processes_are_where_the_plan_has_them() -> None:
    assert [place.node_id for place in spread(["a", "b"], 5)] == ["a", "a", "a", "b", "b"]
    assert [place.node_id for place in spread(["a", "b", "c"], 2)] == ["a", "b"]
    assert spread(["a"], 0) == []


def test_ranks_are_numbered_node_by_node() -> None:
    """As Ray 2.60 gave 24 cards of three nodes to as many ranks."""
    given = "ABBBBBBBBAAACAAAACCCCCCC"
    order = order_by_node(list(given))
    assert "".join(given[i] for i in order) == 8 * "A" + 8 * "B" + 8 * "C"
    assert order[:9] == [0, 9, 10, 11, 13, 14, 15, 16, 1]
    assert order_by_node(["b", "b", "a"]) == [0, 1, 2]


KEY = "rollout.wide.parts"
"""What sets over how many cards an engine is divided."""


def ranks(*nodes: int) -> list[NodeCards]:
    """One rank per card; nodes: how many cards each has."""
    return [
        NodeCards(f"n{node}", (str(card),))
        for node, cards in enumerate(nodes)
        for card in range(cards)
    ]


def test_one_card_each_in_the_order_of_the_ranks() -> None:
    assert shared_placement(ranks(2, 2), 3, {KEY: 1}) == [
        NodeCards("n0", ("0",)),
        NodeCards("n0", ("1",)),
        NodeCards("n1", ("0",)),
    ]


def test_an_engine_does_not_straddle_nodes() -> None:
    assert shared_placement(ranks(3, 3), 2, {KEY: 2}) == [
        NodeCards("n0", ("0", "1")),
        NodeCards("n1", ("0", "1")),
    ]
    with pytest.raises(SettingsConflict, match=rf"of 2 cards each \({KEY}\) .* room for 2"):
        shared_placement(ranks(3, 3), 3, {KEY: 2})


def test_ranks_that_came_in_another_order_are_sorted() -> None:
    assert shared_placement(ranks(2, 2)[::-1], 2, {KEY: 2}) == [
        NodeCards("n0", ("0", "1")),
        NodeCards("n1", ("0", "1")),
    ]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(1, 4), st.data())
def test_no_card_is_shared_by_two_engines(
    nodes: list[int], parallel: int, data: st.DataObject
) -> None:
    room = sum(cards // parallel for cards in nodes)
    engines = data.draw(st.integers(0, room))
    placement = shared_placement(ranks(*nodes), engines, {KEY: parallel})
    used = [(place.node_id, card) for place in placement for card in place.cards]
    assert len(placement) == engines and all(len(place.cards) == parallel for place in placement)
    assert len(used) == len(set(used))
