"""Merged adapters by each route from two ranks to two vLLM engines, and a hundred syncs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from decided import decided_model, decided_role

from plimsoll.cluster.local import LocalCluster
from plimsoll.cluster.protocol import Cluster
from plimsoll.cluster.ray import RayCluster
from plimsoll.cluster.route import ActorRoute
from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.engine import AdapterConfig, OptimizerConfig, TrainedRole
from plimsoll.config.engines import RolloutEngineConfig
from plimsoll.config.rollout import DecidedRoute, RolloutConfig, SyncConfig
from plimsoll.data.packing import pack
from plimsoll.errors import WeightSyncError
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import BatchCounts, Ints, Sample
from plimsoll.sampler.protocol import EngineSpec
from plimsoll.sampler.transformers.config import TransformersConfig
from plimsoll.sampler.transformers.engine import TransformersEngine
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.sync.proof import WeightSync, prepare_sync, prove, sync_weights
from plimsoll.trainer.objectives import NllObjective
from plimsoll.trainer.worker import Worker
from plimsoll.trainer.zero.config import ZeroConfig

RNG = np.random.default_rng(0)
PROBE: list[Ints] = [RNG.integers(0, 15, 24) for _ in range(4)]
BUCKET = 20_000
SYNCS = 100


def write_model(path: Path) -> Path:
    config = tiny_config("qwen2", True, vocab=64, hidden=64, heads=2, feed_forward=96)
    write_tiny_model(path, config, 0, make_tokenizer())
    return path


def role_of(model: Path, stage: Literal[0, 3], *targets: str) -> TrainedRole:
    role = TrainedRole(
        model=decided_model(path=str(model), dtype="float32"),
        adapter=AdapterConfig(rank=4, alpha=8.0, targets=targets),
        optimizer=OptimizerConfig(max_grad_norm=0),
    )
    return decided_role(role.with_engine(ZeroConfig(stage=stage)))


def rollout_of(engine: RolloutEngineConfig, route: DecidedRoute, engines: int) -> RolloutConfig:
    sync = SyncConfig(route=route, bucket_bytes=BUCKET)
    return RolloutConfig(dtype="float32", engines=engines, sync=sync).with_engine(engine)


def train(cluster: Cluster, rate: float) -> None:
    rows = [Sample(RNG.integers(0, 15, 24), np.arange(24) >= 1) for _ in range(4)]
    packs = pack(rows, cluster.streams, 256)
    counts = BatchCounts(4 * 23, 4)
    cluster.call(
        Worker.train,
        [("actor", own, [{}] * len(own), counts, NllObjective(), rate) for own in packs],
    ).result()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = write_model(tmp_path_factory.mktemp("routes"))
    rollout = rollout_of(VllmConfig(cpu_kv_cache_gib=0.25), "host", 2)
    specs = [EngineSpec(i, str(model), 64, 1, "cpu", rollout) for i in range(2)]
    made = RayCluster(ClusterConfig(ranks=2, device="cpu"), specs, threads=1, device="cpu")
    try:
        made.all(Worker.load_model, "actor", role_of(model, 3, "q_proj", "down_proj"), 1.0)
        yield made
    finally:
        made.close()


@pytest.mark.engine
@pytest.mark.parametrize("route", ["host", "nccl", "ipc"])
def test_two_engines_get_merged_adapters(cluster: Cluster, route: DecidedRoute) -> None:
    """On CPU gloo stands for NCCL, and shared tensors of torch.multiprocessing for a card's."""
    rollout = rollout_of(VllmConfig(cpu_kv_cache_gib=0.25), route, 2)
    way = ActorRoute(cluster, "actor", 256, rollout)
    sync = WeightSync(way, BUCKET, PROBE, "float32", 4.0, most=1e-4)
    for version in (1, 2):
        train(cluster, 0.05)
        with pytest.raises(WeightSyncError):
            prove(sync, version)
        report = sync_weights(sync, version)
        assert report.route == route and report.gap < 1e-5
        # Two layers: queries, keys, values, outputs; gate, up, down. Neither norms nor embedding.
        attention, mlp = 4 * (64 * 64 + 3 * 64 * 64 + 3 * 64), 4 * 3 * 64 * 96
        assert 0 < report.bytes <= 2 * (attention + mlp)


@pytest.mark.slow
def test_a_hundred_syncs_of_a_merged_adapter_leave_the_base_as_it_was(tmp_path: Path) -> None:
    """Each is proved. The engine's tensors without an adapter are not even sent."""
    model = write_model(tmp_path)
    rollout = rollout_of(TransformersConfig(), "host", 1)
    cluster = LocalCluster([EngineSpec(0, str(model), 64, 1, "cpu", rollout)], 1, "cpu")
    [engine] = cluster._engines
    assert isinstance(engine, TransformersEngine)
    cluster.all(Worker.load_model, "actor", role_of(model, 0, "q_proj"), 1.0)
    module = cluster._worker._engine("actor").module
    base = {n: p.detach().clone() for n, p in module.named_parameters() if not p.requires_grad}
    first = {n: p.detach().clone() for n, p in engine._model.named_parameters()}
    way = ActorRoute(cluster, "actor", 256, rollout)
    sync = prepare_sync(way, rollout.sync, PROBE, "float32")
    for version in range(1, SYNCS + 1):
        train(cluster, 1e-3)
        report = sync_weights(sync, version)
        assert report.version == version and report.gap < report.rounding < 1e-3
    assert all(torch.equal(module.get_parameter(n), tensor) for n, tensor in base.items())
    last = dict(engine._model.named_parameters())
    changed = {n for n, tensor in first.items() if not torch.equal(last[n], tensor)}
    assert changed == {n for n in first if n.endswith("q_proj.weight")}
    cluster.close()
