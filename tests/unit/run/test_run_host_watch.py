"""Which node of a run has too little memory left."""

from __future__ import annotations

from plimsoll.run.ledger import find_full_node
from plimsoll.run.readings import HostReading


def host(node: str, used: int, capacity: int) -> HostReading:
    return HostReading(node, peak=0, held=0, used=used, capacity=capacity)


def test_the_fullest_node_is_named_with_both_figures() -> None:
    hosts = [host("a", 97 * 10**9, 10**11), host("b", 99 * 10**9, 10**11)]
    told = find_full_node(hosts, 0.02)
    assert told is not None
    assert told.startswith("b has 1 GB of 100 GB host memory left")
    assert told.endswith("(0.02: 2 GB)")


def test_the_bound_itself_is_enough_and_0_switches_it_off() -> None:
    assert find_full_node([host("a", 98, 100)], 0.02) is None
    assert find_full_node([host("a", 100, 100)], 0.0) is None
    assert find_full_node([], 0.5) is None
