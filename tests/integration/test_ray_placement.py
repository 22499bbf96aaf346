"""Ranks and engines on several nodes and their cards, by Ray's own book-keeping.

Two real Ray nodes on this machine; their GPUs are only counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import ray
from ray.cluster_utils import Cluster

from plimsoll.cluster.ray_actors import Member, create_ranks, members, share_cards
from plimsoll.cluster.ray_start import wait_for_nodes
from plimsoll.cluster.start import run_device
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.rollout import RolloutConfig
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.rollout.protocol import EngineSpec
from plimsoll.rollout.vllm.config import VllmConfig

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    """Of four cards each; started by someone who wants of Ray what other programs want."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # Ray counts no more than it names
        nodes = Cluster()
        for _ in range(2):
            nodes.add_node(num_cpus=1, num_gpus=4)
        ray.init(nodes.address, logging_level="ERROR")
        yield
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="module")
def groups(two_nodes: None) -> tuple[list[Member], list[Member]]:
    """Four ranks of the actor, and three of the critic's own."""
    return (
        members("training rank", create_ranks(4, "cuda", 1, ()), timeout=120),
        members("critic rank", create_ranks(3, "cuda", 1, ()), timeout=120),
    )


def visible_to(group: list[Member]) -> list[str]:
    """The cards that each one's CUDA would see."""
    # A lambda: a named function of this file would have to be importable over there.
    asked = lambda _: os.environ["CUDA_VISIBLE_DEVICES"]  # noqa: E731
    found: list[str] = ray.get([member.actor.__ray_call__.remote(asked) for member in group])
    return found


def test_a_joined_cluster_is_computed_on_where_its_gpus_are(
    two_nodes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this machine has: it may be the head, without a GPU."""
    devices: list[Literal["cuda", "cpu"]] = ["cuda", "cpu"]
    joined = [ClusterConfig(address="joined", device=device) for device in devices]
    assert [run_device(config) for config in joined] == devices
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(ConfigError, match=r"no GPU .* joined"):
        run_device(joined[0])


def test_a_group_of_ranks_is_on_one_node_and_each_has_a_card(
    groups: tuple[list[Member], list[Member]],
) -> None:
    actors, critics = groups
    assert len({rank.host.node_id for rank in actors}) == 1
    assert len({rank.host.node_id for rank in critics}) == 1
    assert actors[0].host.node_id != critics[0].host.node_id
    assert sorted(card for rank in actors for card in rank.host.cards) == list("0123")
    assert [rank.role for rank in critics] == [f"critic rank {i}" for i in range(3)]
    assert visible_to(actors) == [",".join(rank.host.cards) for rank in actors]


def test_engines_see_the_cards_of_the_ranks_that_they_share(
    groups: tuple[list[Member], list[Member]],
) -> None:
    ranks, critics = groups
    rollout = RolloutConfig(placement="shared", dtype="bfloat16").with_engine(
        VllmConfig(tensor_parallel=2)
    )
    specs = [EngineSpec(i, "none", 8, 1, "cuda", rollout) for i in range(3)]
    actors = share_cards(specs, "cuda", [*ranks, *critics])
    found = members("rollout engine", actors, timeout=120)
    seen = visible_to(found)
    assert seen == [",".join(engine.host.cards) for engine in found]
    cards = {(engine.host.node_id, cards) for engine, cards in zip(found, seen, strict=True)}
    spare = sorted(card for rank in critics for card in rank.host.cards)[:2]
    assert cards == {
        (ranks[0].host.node_id, "0,1"),
        (ranks[0].host.node_id, "2,3"),
        (critics[0].host.node_id, ",".join(spare)),
    }


def test_ranks_on_cpu_are_spread_over_the_nodes_and_work_where_the_command_does(
    two_nodes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = wait_for_nodes(ClusterConfig(address="joined", nodes=2))
    ranks = members("training rank", create_ranks(2, "cpu", 1, nodes), timeout=120)
    assert [rank.host.node_id for rank in ranks] == nodes
    assert nodes[0] == ray.get_runtime_context().get_node_id() != nodes[1]
    where = [rank.actor.__ray_call__.remote(lambda _: os.getcwd()) for rank in ranks]
    assert ray.get(where) == [str(tmp_path)] * 2


def test_what_the_cluster_lacks_is_told_while_it_is_waited_for(
    groups: tuple[list[Member], list[Member]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third node; and a second card where one of eight is free."""
    few = ClusterConfig(address="joined", nodes=3, start_timeout=0.6)
    here = "the Ray cluster at joined has 2 of 3 nodes"
    with pytest.raises(PlimsollError, match=rf"^{here} \(cluster.nodes\) after 1 s"):
        wait_for_nodes(few)
    monkeypatch.setattr("plimsoll.cluster.ray_actors._SOON_SECONDS", 0.1)
    cards = "1 of the cluster's 8 GPUs are free"
    with pytest.raises(PlimsollError, match=rf"the training ranks in 0 s .*: {cards}\. Ask for"):
        members("training rank", create_ranks(2, "cuda", 1, ()), timeout=0.2)
    told = f"{here}: waiting for the others\nwaiting for Ray to start the training ranks: {cards}\n"
    assert capfd.readouterr().err == told
