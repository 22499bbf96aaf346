"""Which process lives on which card of which node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.config.cluster import RANK_NAMES
from plimsoll.config.load import validate
from plimsoll.config.rl import RlConfig
from plimsoll.config.run import JobConfig
from plimsoll.config.yaml_tree import read_tree
from plimsoll.jobs.dpo import DpoConfig
from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import spec_of
from plimsoll.memory.contents.layout import Layout, Slot, lay_out

BASE = """\
run: {directory: out, steps: 10}
data: {train: {path: x, prompt: q}}
actor: {model: {path: a}}
"""
PPO = BASE + "critic: {model: {path: c}}\nreward_model: {role: {model: {path: r}}}\n"


def ppo(cluster: str, rollout: str) -> RlConfig:
    text = f"{PPO}cluster: {cluster}\nrollout: {rollout}\n"
    return validate(RlConfig, read_tree(text, "ppo.yaml"))


def where(layout: Layout) -> dict[str, Slot]:
    return {process.name: process.slot for process in layout.processes}


@pytest.mark.parametrize(
    ("model", "batch"), [(SftConfig, ""), (DpoConfig, ""), (SftConfig, "batch: {sequences: 4}\n")]
)
def test_a_local_job_is_one_process(model: type[JobConfig], batch: str) -> None:
    config = validate(model, read_tree(BASE + batch + "cluster: {where: local}\n", "a.yaml"))
    assert where(lay_out(spec_of(config), 0)) == {"local": Slot(0)}
    assert where(lay_out(spec_of(config), 4)) == {"local": Slot(0, 0)}


def test_ranks_fill_nodes_card_by_card_and_engines_follow() -> None:
    config = ppo("{ranks: 3, critic_ranks: 1}", "{engines: 2, vllm: {tensor_parallel: 2}}")
    layout = lay_out(spec_of(config), 4, 2)
    assert where(layout) == {
        "controller": Slot(0),
        "ray 0": Slot(0),
        "ray 1": Slot(1),
        "rank 0": Slot(0, 0),
        "rank 1": Slot(0, 1),
        "rank 2": Slot(0, 2),
        "critic rank 0": Slot(0, 3),
        "engine 0": Slot(1),
        "engine 0 worker 0": Slot(1, 0),
        "engine 0 worker 1": Slot(1, 1),
        "engine 1": Slot(1),
        "engine 1 worker 0": Slot(1, 2),
        "engine 1 worker 1": Slot(1, 3),
    }
    assert layout.unplaced == () and layout.cards_needed == 8


def test_an_engine_stays_on_one_node() -> None:
    layout = lay_out(spec_of(ppo("{ranks: 1}", "{engines: 1, vllm: {tensor_parallel: 2}}")), 2, 2)
    assert where(layout)["engine 0 worker 0"] == Slot(1, 0)
    assert where(layout)["engine 0 worker 1"] == Slot(1, 1)


def test_the_stages_of_an_engine_are_on_one_node() -> None:
    rollout = "{vllm: {tensor_parallel: 2, pipeline_parallel: 2}}"
    layout = lay_out(spec_of(ppo("{ranks: 1}", rollout)), 4, 2)
    placed = where(layout)
    assert [placed[f"engine 0 worker {part}"] for part in range(4)] == [
        Slot(1, c) for c in range(4)
    ]
    assert layout.cards_needed == 5
    assert lay_out(spec_of(ppo("{ranks: 1}", rollout)), 3, 2).unplaced == ("engine 0",)


def test_shared_engines_begin_again_at_the_first_card() -> None:
    layout = lay_out(spec_of(ppo("{ranks: 2}", "{engines: 2, placement: shared}")), 2)
    placed = where(layout)
    assert placed["engine 0 worker 0"] == placed["rank 0"] == Slot(0, 0)
    assert placed["engine 1 worker 0"] == placed["rank 1"] == Slot(0, 1)
    assert layout.cards_needed == 2


def test_who_finds_no_card_is_named() -> None:
    layout = lay_out(spec_of(ppo("{ranks: 2, critic_ranks: 2}", "{engines: 2}")), 3)
    assert layout.unplaced == ("critic rank 1", "engine 0", "engine 1")
    assert layout.cards_needed == 6
    too_wide = lay_out(spec_of(ppo("{ranks: 1}", "{vllm: {tensor_parallel: 4}}")), 2, 3)
    assert too_wide.unplaced == ("engine 0",)


OWN_NODES = "nodes: 4, own_nodes: {actor: 2, critic: 1, engines: 1}"


@pytest.mark.parametrize("cards", [4, 0])
def test_groups_have_nodes_of_their_own(cards: int) -> None:
    cluster = f"{{ranks: 4, critic_ranks: 2, {OWN_NODES}}}"
    layout = lay_out(spec_of(ppo(cluster, "{engines: 2, vllm: {tensor_parallel: 2}}")), cards, 4)
    nodes = {name: slot.node for name, slot in where(layout).items()}
    assert [nodes[f"rank {i}"] for i in range(4)] == [0, 0, 1, 1]
    assert [nodes[f"critic rank {i}"] for i in range(2)] == [2, 2]
    assert [nodes[f"engine {i}"] for i in range(2)] == [3, 3]
    assert layout.unplaced == ()


@pytest.mark.parametrize("cards", [4, 0])
def test_ranks_of_reward_models_come_after_the_critics(cards: int) -> None:
    cluster = "{ranks: 2, critic_ranks: 1, reward_ranks: 3, nodes: 2}"
    layout = lay_out(spec_of(ppo(cluster, "{engines: 1}")), cards, 2)
    placed = where(layout)
    names = ["rank 0", "rank 1", "critic rank 0", *(f"reward rank {i}" for i in range(3))]
    slots = [placed[name] for name in names]
    if cards:
        assert slots == [*(Slot(0, card) for card in range(4)), Slot(1, 0), Slot(1, 1)]
        assert placed["engine 0 worker 0"] == Slot(1, 2) and layout.cards_needed == 7
    else:
        assert [slot.node for slot in slots] == [0, 1, 0, 0, 0, 1]


def test_a_group_is_not_placed_on_cards_of_anothers_nodes() -> None:
    cluster = f"{{ranks: 6, critic_ranks: 2, {OWN_NODES}}}"
    layout = lay_out(spec_of(ppo(cluster, "{engines: 1}")), 2, 4)
    assert layout.unplaced == ("rank 2", "rank 5")
    assert where(layout)["rank 3"] == Slot(1, 0)


def test_engines_share_the_cards_of_ranks_with_nodes_of_their_own() -> None:
    cluster = "{ranks: 2, nodes: 2, own_nodes: {actor: 2}}"
    placed = where(lay_out(spec_of(ppo(cluster, "{engines: 2, placement: shared}")), 4, 2))
    assert placed["engine 1 worker 0"] == placed["rank 1"] == Slot(1, 0)


def test_without_cards_all_live_on_the_host() -> None:
    layout = lay_out(spec_of(ppo("{ranks: 2}", "{engines: 1}")), 0)
    assert set(where(layout)) == {"controller", "ray 0", "rank 0", "rank 1", "engine 0"}
    assert set(where(layout).values()) == {Slot(0)}


@given(
    ranks=st.integers(1, 9),
    critic=st.integers(1, 5),
    reward=st.integers(1, 3),
    engines=st.integers(1, 4),
    parallel=st.sampled_from([1, 2, 4]),
    stages=st.integers(1, 3),
    cards=st.integers(1, 8),
    nodes=st.integers(1, 4),
)
def test_no_card_has_two_processes_that_have_it_for_themselves(
    ranks: int,
    critic: int,
    reward: int,
    engines: int,
    parallel: int,
    stages: int,
    cards: int,
    nodes: int,
) -> None:
    config = ppo(
        f"{{ranks: {ranks}, critic_ranks: {critic}, reward_ranks: {reward}}}",
        f"{{engines: {engines}, "
        f"vllm: {{tensor_parallel: {parallel}, pipeline_parallel: {stages}}}}}",
    )
    layout = lay_out(spec_of(config), cards, nodes)
    taken = [p.slot for p in layout.processes if p.slot.card is not None]
    assert len(set(taken)) == len(taken)
    assert all(slot.card is not None and slot.card < cards and slot.node < nodes for slot in taken)
    groups = [p for p in layout.processes if p.kind in (*RANK_NAMES.values(), "engine")]
    assert len(groups) + len(layout.unplaced) == ranks + critic + reward + engines
    for index in range(engines):
        own = [p for p in layout.processes if p.kind == "engine worker" and p.index == index]
        assert len(own) in (0, parallel * stages) and len({p.slot.node for p in own}) <= 1


def test_nodes_with_the_same_processes_are_of_one_kind() -> None:
    """512 ranks on 64 nodes of 8 cards, 40 engines of 4 cards on 20: three kinds, and idle ones."""
    config = ppo("{ranks: 512}", "{engines: 40, vllm: {tensor_parallel: 4}}")
    layout = lay_out(spec_of(config), 8, 128)
    assert [(kind.nodes[0], len(kind.nodes)) for kind in layout.kinds] == [
        *((0, 1), (1, 63)),
        *((64, 1), (65, 19)),
        (84, 44),
    ]
    placed = where(layout)
    assert len(placed) == len([*layout.processes]) == 1 + 128 + 512 + 40 + 160
    assert placed["rank 511"] == Slot(63, 7) and placed["ray 127"] == Slot(127)
    assert placed["engine 39"] == Slot(83) and placed["engine 39 worker 3"] == Slot(83, 7)


@given(
    ranks=st.integers(1, 30),
    critic=st.integers(1, 9),
    engines=st.integers(1, 9),
    parallel=st.sampled_from([1, 2, 4]),
    placement=st.sampled_from(["own", "shared"]),
    cards=st.integers(1, 8),
    nodes=st.integers(1, 6),
)
def test_every_process_is_where_filling_card_by_card_puts_it(
    ranks: int,
    critic: int,
    engines: int,
    parallel: int,
    placement: str,
    cards: int,
    nodes: int,
) -> None:
    vllm = f"vllm: {{tensor_parallel: {parallel}}}"
    config = ppo(
        f"{{ranks: {ranks}, critic_ranks: {critic}}}",
        f"{{engines: {engines}, placement: {placement}, {vllm}}}",
    )
    layout = lay_out(spec_of(config), cards, nodes)
    free = [Slot(node, card) for node in range(nodes) for card in range(cards)]
    names = [*(f"rank {i}" for i in range(ranks)), *(f"critic rank {i}" for i in range(critic))]
    expected = dict(zip(names, free, strict=False))
    left = [*expected.values()] if placement == "shared" else free[len(expected) :]
    for index in range(engines):
        while left and (len(left) < parallel or left[parallel - 1].node != left[0].node):
            left = left[1:]
        own, left = left[:parallel], left[parallel:]
        expected |= {f"engine {index} worker {part}": slot for part, slot in enumerate(own)}
    found = {name: slot for name, slot in where(layout).items() if slot.card is not None}
    assert found == expected
    started = {name for name in where(layout) if name.removeprefix("engine ").isdecimal()}
    assert [*layout.unplaced] == [
        *(name for name in names if name not in expected),
        *(name for i in range(engines) if (name := f"engine {i}") not in started),
    ]
