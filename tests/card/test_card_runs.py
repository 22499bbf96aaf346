"""PPO on Ray with ranks and engines on cards: weights go by NCCL and by CUDA IPC."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import PPO, SFT, column, metrics, run_here, write_config, write_task

STEPS = 2


@pytest.fixture(scope="module")
def card_ray() -> Iterator[str]:
    """The address of a Ray with four cards, which it would not find by itself."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # as `start_ray` has it
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 4})
    yield cluster.address
    cluster.shutdown()


@pytest.mark.parametrize(
    ("route", "placement", "engines"),
    [("nccl", "own", 1), pytest.param("ipc", "shared", 2, marks=pytest.mark.slow)],
)
def test_ppo_on_two_ranks(
    route: str, placement: str, engines: int, tmp_path: Path, card_ray: str
) -> None:
    """By NCCL to an engine on a card of its own; by IPC to engines on the cards of the ranks."""
    config = copy.deepcopy(PPO)
    config["run"] |= {"steps": STEPS, "save_every": None, "eval_every": STEPS}
    config["cluster"] |= {"where": "ray", "device": "cuda", "ranks": 2, "address": card_ray}
    sampled = {"engines": engines, "placement": placement, "sync": {"route": route}}
    config["rollout"] |= sampled | {"dtype": "float32"}
    for role in ("actor", "critic"):
        config[role]["zero"] = {"stage": 3}
        config[role]["model"] |= {"dtype": "float32", "kernels": "own"}  # Liger needs a real card
    write_task(tmp_path)
    write_config(tmp_path, "ppo", config)
    outcome = run_here(tmp_path, "ppo", "ppo.yaml")
    assert outcome.code == 0, outcome.err
    rows = metrics(tmp_path / "ppo")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all(np.isfinite(value) for row in rows for value in row.values())
    for row in rows[1:]:
        assert row[f"sync/bytes/{route}"] > 0 and row["sync/logprob_gap"] < 1e-5
        assert row["actor/grad_norm"] > 0


@pytest.mark.parametrize("exchange", ["heads", pytest.param("keys", marks=pytest.mark.slow)])
def test_two_cards_that_share_packs_learn_what_one_rank_learns(
    exchange: str, tmp_path: Path, card_ray: str
) -> None:
    """By NCCL, with votes before each exchange."""
    write_task(tmp_path)
    cards = {"where": "ray", "device": "cuda", "ranks": 2, "sequence_parallel": 2}
    cards |= {"sequence_exchange": exchange, "address": card_ray, "memory_halvings": 1}
    alone = {"where": "ray", "device": "cpu", "threads": 1, "address": card_ray}
    clusters = {"shared": cards, "alone": alone}  # this process may have used a card
    found = {}
    for name, cluster in clusters.items():
        config = copy.deepcopy(SFT)
        config["run"] |= {"directory": name, "steps": STEPS, "save_every": None, "eval_every": None}
        config["data"].pop("eval", None)
        config["cluster"] = cluster
        config["actor"]["zero"] = {"stage": 2}
        config["actor"]["model"] |= {"dtype": "float32", "kernels": "own"}
        write_config(tmp_path, name, config)
        outcome = run_here(tmp_path, "sft", f"{name}.yaml")
        assert outcome.code == 0, outcome.err
        found[name] = metrics(tmp_path / name)
    for figure in ("loss", "grad_norm"):
        ours, whole = (column(found[name], figure) for name in clusters)
        assert ours == pytest.approx(whole, rel=1e-4)
