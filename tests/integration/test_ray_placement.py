"""Ranks and engines on several nodes and their cards, by Ray's own book-keeping.

Three real Ray nodes on this machine; their GPUs are only counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import ray
from commands import wait_for
from ray.cluster_utils import Cluster

from plimsoll.cluster.placement import Claim
from plimsoll.cluster.ray_actors import Member
from plimsoll.cluster.ray_members import (
    EngineHome,
    Places,
    create_engine,
    create_ranks,
    find_places,
    members,
    shared_homes,
)
from plimsoll.cluster.ray_start import wait_for_nodes
from plimsoll.cluster.start import run_device
from plimsoll.config.cluster import ClusterConfig, OwnNodes
from plimsoll.config.rollout import RolloutConfig
from plimsoll.errors import ConfigError, NodesMissing, PlimsollError
from plimsoll.sampler.protocol import EngineSpec
from plimsoll.sampler.vllm.config import VllmConfig

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def nodes() -> Iterator[None]:
    """Start three nodes of four cards each and one without, with a user's own settings of Ray."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # Ray counts no more than it names
        cluster = Cluster()
        for cards in (0, 4, 4):
            cluster.add_node(num_cpus=1, num_gpus=cards)
        ray.init(cluster.address, logging_level="ERROR")
        yield
        ray.shutdown()
        cluster.shutdown()


CLAIMS = [Claim("actor", 3), Claim("critic", 2), Claim("engines", 1, cards=2)]


@pytest.fixture
def places(nodes: None, request: pytest.FixtureRequest) -> Iterator[Places]:
    """The places of three ranks, two ranks of the critic, and an engine of two cards."""
    config = ClusterConfig(nodes=2, own_nodes=request.param, start_timeout=60)
    places = find_places(config, CLAIMS, "cuda", ())
    yield places
    for group in {place.placement_group.id: place for [place, *_] in places.values()}.values():
        ray.util.remove_placement_group(group.placement_group)
    wait_for(lambda: ray.available_resources().get("GPU") == 8, "cards that are free again")


def engines(count: int, placement: Literal["own", "shared"]) -> list[EngineSpec]:
    rollout = RolloutConfig(placement=placement, dtype="bfloat16").with_engine(
        VllmConfig(tensor_parallel=2)
    )
    return [EngineSpec(i, "none", 8, 1, "cuda", rollout) for i in range(count)]


def nodes_of(group: list[Member]) -> set[str]:
    return {member.host.node_id for member in group}


def visible_to(group: list[Member]) -> list[str]:
    """The cards that each one's CUDA would see."""
    # A lambda: a named function of this file would have to be importable over there.
    asked = lambda _: os.environ["CUDA_VISIBLE_DEVICES"]  # noqa: E731
    found: list[str] = ray.get([member.actor.__ray_call__.remote(asked) for member in group])
    return found


def test_a_joined_cluster_is_computed_on_where_its_gpus_are(
    nodes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this machine has: it may be the head, without a GPU."""
    devices: list[Literal["cuda", "cpu"]] = ["cuda", "cpu"]
    joined = [ClusterConfig(address="joined", device=device) for device in devices]
    assert [run_device(config, 0) for config in joined] == devices
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(ConfigError, match=r"no GPU .* joined"):
        run_device(joined[0], 0)


@pytest.mark.parametrize("places", [OwnNodes()], indirect=True)
def test_groups_are_packed_each_rank_has_a_card_and_engines_share_them(places: Places) -> None:
    actors = members("training rank", create_ranks(places["actor"], "cuda", 1), timeout=120)
    critics = members("critic rank", create_ranks(places["critic"], "cuda", 1), timeout=120)
    (own,) = members(
        "rollout engine",
        [*map(create_engine, map(EngineHome, engines(1, "own"), places["engines"]))],
        120,
    )
    assert len(nodes_of(actors)) == len(nodes_of(critics)) == 1
    assert nodes_of(actors) != nodes_of(critics)
    assert len(own.host.cards) == 2 and own.host.node_id in nodes_of(critics)
    assert len({(r.host.node_id, r.host.cards) for r in (*actors, *critics)}) == 5
    assert [rank.role for rank in critics] == [f"critic rank {i}" for i in range(2)]
    assert visible_to([*actors, own]) == [",".join(m.host.cards) for m in (*actors, own)]

    found = members(
        "rollout engine",
        [*map(create_engine, shared_homes(engines(2, "shared"), [*actors, *critics]))],
        120,
    )
    seen = visible_to(found)
    assert seen == [",".join(engine.host.cards) for engine in found]
    wanted = [
        sorted(card for rank in group for card in rank.host.cards)[:2]
        for group in (actors, critics)
    ]
    assert sorted(seen) == sorted(",".join(cards) for cards in wanted)
    assert [nodes_of([engine]) for engine in found] in (
        [nodes_of(actors), nodes_of(critics)],
        [nodes_of(critics), nodes_of(actors)],
    )


def test_cards_that_are_missing_are_named_soon(
    nodes: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups with nodes of their own, of which one node has its cards in use by somebody."""
    monkeypatch.setattr("plimsoll.cluster.ray_members._SOON_SECONDS", 0.1)
    held = ray.util.placement_group([{"GPU": 3}], strategy="STRICT_PACK")
    assert held.wait(30)
    apart = ClusterConfig(nodes=2, own_nodes=OwnNodes(actor=1, critic=1), start_timeout=1)
    asked = [Claim("actor", 4), Claim("critic", 2)]
    with pytest.raises(PlimsollError, match="no cards for the run after 1 s") as caught:
        find_places(apart, asked, "cuda", ())
    ray.util.remove_placement_group(held)
    told = capfd.readouterr().err
    for text in (str(caught.value), told):
        assert "4 training ranks and 2 critic ranks" in text
        assert "has 0 of 0 GPUs free" in text and "has 1 of 4 GPUs free" in text
        assert "missing: 1 x 2 GPUs on one node" in text
        assert "this run holds 3 GPUs of" in text
    assert told.count("waiting for cards") == 1


def test_ranks_on_cpu_are_spread_over_the_nodes_and_work_where_the_command_does(
    nodes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ClusterConfig(address="joined", nodes=2)
    ids = wait_for_nodes(config, 0)
    places = find_places(config, [Claim("actor", 2)], "cpu", ids)
    ranks = members("training rank", create_ranks(places["actor"], "cpu", 1), timeout=120)
    assert [rank.host.node_id for rank in ranks] == ids
    assert ids[0] == ray.get_runtime_context().get_node_id() != ids[1]
    where = [rank.actor.__ray_call__.remote(lambda _: os.getcwd()) for rank in ranks]
    assert ray.get(where) == [str(tmp_path)] * 2


def test_a_node_that_is_missing_is_told(nodes: None, capfd: pytest.CaptureFixture[str]) -> None:
    few = ClusterConfig(address="joined", nodes=4, ranks=8, start_timeout=0.6)
    here = "the Ray cluster at joined has 3 of 4 nodes"
    with pytest.raises(NodesMissing, match=rf"^{here} .* \(cluster.nodes\) after 1 s") as missing:
        wait_for_nodes(few, engines=4)
    flags = "--cluster.nodes 3 --cluster.ranks 6 --rollout.engines 3"
    assert " ".join(missing.value.flags) == flags  # with which a restart goes on
    assert capfd.readouterr().err.count(here) == 1
