"""Where ranks run, and that they have their cards before engines ask for any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from plimsoll.cluster import ray as cluster
from plimsoll.cluster.ray import RayCluster, _places
from plimsoll.cluster.ray_actors import Host, Member
from plimsoll.config.cluster import ClusterConfig, Device
from plimsoll.config.rollout import RolloutConfig
from plimsoll.rollout.protocol import EngineSpec


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
    """Of nodes with unlike numbers, parts of one size, none of which is on two nodes."""
    places = list(_places(group(nodes), "cuda", 1))
    assert [place.rank for place in places] == list(range(len(nodes)))
    assert {place.ranks_per_node for place in places} == {together}
    assert {(place.address, place.port) for place in places} == {(f"10.0.0.{nodes[0]}", 4000)}
    parts = [nodes[i : i + together] for i in range(0, len(nodes), together)]
    assert all(len(set(part)) == 1 for part in parts)


class Asked(Exception):
    """Engines were asked for."""


@pytest.mark.parametrize(("device", "first"), [("cuda", "ranks"), ("cpu", "engines")])
def test_engines_ask_for_cards_once_the_ranks_have_theirs(
    device: Device, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may else give them cards of the node that the ranks would fill. On CPU nobody waits."""
    settled: list[str] = []

    def settle(role: str, actors: Sequence[Any], timeout: float) -> list[Member]:
        settled.append(role)
        return []

    def ask(*_: object) -> list[Any]:
        raise Asked

    monkeypatch.setattr(cluster, "wait_for_nodes", lambda config: ["a"])
    monkeypatch.setattr(cluster, "create_ranks", lambda *_: [])
    monkeypatch.setattr(cluster, "rank_members", settle)
    monkeypatch.setattr(cluster, "create_engines", ask)
    monkeypatch.setattr(RayCluster, "_read_nodes", lambda *_: {})
    begun = RayCluster.__new__(RayCluster)
    begun._watches = {}
    spec = EngineSpec(0, "none", 8, 1, "cuda", RolloutConfig(placement="own"))
    with pytest.raises(Asked):
        begun._start_members(ClusterConfig(ranks=2), [spec], 1, device)
    wanted = ["training rank", "critic rank"] if first == "ranks" else []
    assert settled == wanted
