"""Which nodes and cards processes ask for, what is missing, and engines on the ranks' cards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.cluster.placement import (
    Claim,
    NodeCards,
    NodeSupply,
    Reservation,
    describe_shortage,
    order_by_node,
    reservations,
    shared_placement,
)
from plimsoll.config.cluster import ClusterConfig, NodeGroup, OwnNodes
from plimsoll.errors import SettingsConflict

CLAIMS = (Claim("actor", 4), Claim("critic", 2), Claim("engines", 3, cards=2))
APART = ClusterConfig(nodes=4, own_nodes=OwnNodes(actor=2, critic=1, engines=1))


def nodes_of(cluster: ClusterConfig, group: NodeGroup, count: int) -> list[int]:
    return [cluster.node_of(group, i, count) for i in range(count)]


def test_processes_are_spread_evenly_over_the_nodes_of_their_group() -> None:
    together = ClusterConfig(nodes=2)
    assert nodes_of(together, "actor", 5) == nodes_of(together, "engines", 5) == [0, 0, 0, 1, 1]
    assert nodes_of(ClusterConfig(nodes=3), "critic", 2) == [0, 1]
    assert nodes_of(APART, "actor", 4) == [0, 0, 1, 1]
    assert nodes_of(APART, "critic", 2) == [2, 2]
    assert nodes_of(APART, "engines", 3) == [3, 3, 3]


def test_nodes_of_reward_models_come_before_those_of_the_engines() -> None:
    cluster = ClusterConfig(nodes=4, own_nodes=OwnNodes(actor=1, reward=2, engines=1))
    assert nodes_of(cluster, "actor", 2) == [0, 0]
    assert nodes_of(cluster, "reward", 4) == [1, 1, 2, 2]
    claims = (Claim("actor", 2), Claim("reward", 4), Claim("engines", 1, cards=2))
    (asked,) = reservations(cluster, claims)
    assert asked.bundles == (2, 2, 2, 2) and claims[1].title == "4 reward ranks"


def test_groups_ask_for_cards_one_after_the_other() -> None:
    """In this order engines take no card of a node that ranks would fill. An engine's cards are
    one."""
    asked = reservations(ClusterConfig(), CLAIMS)
    assert [r.bundles for r in asked] == [(1, 1, 1, 1), (1, 1), (2, 2, 2)]
    assert [r.seats for r in asked] == [((0, 1, 2, 3),), ((0, 1),), ((0, 1, 2),)]
    assert not any(r.apart for r in asked)


def test_groups_with_nodes_of_their_own_ask_together() -> None:
    (asked,) = reservations(APART, CLAIMS)
    assert asked.apart and asked.bundles == (2, 2, 2, 6)
    assert asked.seats == ((0, 0, 1, 1), (2, 2), (3, 3, 3))
    assert asked.without_room([8, 8, 8, 8]) == []
    assert asked.without_room([8, 8, 8]) == [2]
    assert asked.without_room([4, 4, 4, 4]) == [6]


def test_a_shortage_says_what_is_asked_there_missing_and_held() -> None:
    engines = reservations(ClusterConfig(), CLAIMS)[2]
    nodes = [NodeSupply("10.0.0.1", 8, 3), NodeSupply("10.0.0.2", 4, 0)]
    held = ["this run holds 5 GPUs of 10.0.0.1", "`train.py` holds 4 GPUs of 10.0.0.2"]
    asked, there, *rest = describe_shortage(engines, nodes, held).split("\n  ")
    assert asked.startswith("asked for 3 rollout engines of 2 cards")
    assert "10.0.0.1 has 3 of 8 GPUs" in there and "10.0.0.2 has 0 of 4 GPUs" in there
    assert rest == [
        "missing: 2 x 2 GPUs on one node",
        *held,
    ]
    never = describe_shortage(reservations(APART, CLAIMS)[0], nodes, [])
    assert "each of them on a node of its own" in never
    assert "even if nobody else holds a GPU" in never


@given(
    bundles=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    room=st.lists(st.integers(0, 8), max_size=4),
    apart=st.booleans(),
)
def test_what_finds_room_is_no_more_than_there_is(
    bundles: list[int], room: list[int], apart: bool
) -> None:
    missing = Reservation((), tuple(bundles), apart, ()).without_room(room)
    assert sum(bundles) - sum(missing) <= sum(room)
    if apart:
        assert len(bundles) - len(missing) <= len(room)
    elif len(room) == 1:
        assert not missing or sum(bundles) > room[0]


def test_ranks_are_numbered_node_by_node() -> None:
    """The places are those that Ray 2.60 gave to 24 ranks on three nodes."""
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
