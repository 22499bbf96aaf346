"""A sync in which an engine dies: the ranks and the other engines are free for the next one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from test_sync_routes import BUCKET, PROBE, role_of, rollout_of, train, write_model

from plimsoll.cluster.ray import RayCluster
from plimsoll.cluster.route import ActorRoute
from plimsoll.config.cluster import ClusterConfig
from plimsoll.errors import EngineDied
from plimsoll.sampler.protocol import EngineSpec
from plimsoll.sampler.transformers.config import TransformersConfig
from plimsoll.trainer.worker import Worker

pytestmark = pytest.mark.engine


def test_nobody_waits_for_an_engine_that_dies_before_it_joins_the_others(tmp_path: Path) -> None:
    """Without a word from the rank, the other engine would wait for half an hour."""
    model = write_model(tmp_path)
    rollout = rollout_of(TransformersConfig(), "nccl", 2)
    specs = [EngineSpec(i, str(model), 64, 1, "cpu", rollout) for i in range(2)]
    settings = ClusterConfig(device="cpu", hang_timeout=120)
    cluster = RayCluster(settings, specs, threads=1, device="cpu")
    try:
        cluster.let_engines_die()
        cluster.all(Worker.load_model, "actor", role_of(model, 0, "q_proj"), 1.0)
        train(cluster, 0.05)
        route = ActorRoute(cluster, "actor", 256, rollout)
        os.kill(cluster._engines[1].host.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="rollout engine 1"):
            route.transfer(BUCKET, 1)
        assert len(cluster.revive_engines()) == 1
        route.renew()
        route.transfer(BUCKET, 1)
        expected = np.concatenate(route.trainer_log_probs(PROBE))
        for log_probs in route.engine_log_probs(PROBE):
            np.testing.assert_allclose(np.concatenate(log_probs), expected, atol=1e-5)
    finally:
        cluster.close()
