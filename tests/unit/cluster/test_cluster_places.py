"""Where ranks run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from plimsoll.cluster.ray import _places
from plimsoll.cluster.ray_actors import Host, Member


def group(nodes: Sequence[str]) -> list[Member]:
    """A rank on each of these nodes."""
    return [
        Member(f"training rank {i}", None, Host(i, f"10.0.0.{node}", 4000 + i, "log", node, ("0",)))
        for i, node in enumerate(nodes)
    ]


@pytest.mark.parametrize(
    ("nodes", "together"),
    [("aaaa", 4), ("aabb", 2), ("aaaabb", 2), ("aaabb", 1), ("ab", 1), ("a", 1)],
)
def test_how_many_ranks_share_a_node(nodes: str, together: int) -> None:
    """Nodes with unlike numbers are cut into parts of one size, none of which is on two nodes."""
    places = list(_places(group(nodes), "cuda", 1))
    assert [place.rank for place in places] == list(range(len(nodes)))
    assert {place.ranks_per_node for place in places} == {together}
    assert {(place.address, place.port) for place in places} == {(f"10.0.0.{nodes[0]}", 4000)}
    parts = [nodes[i : i + together] for i in range(0, len(nodes), together)]
    assert all(len(set(part)) == 1 for part in parts)
