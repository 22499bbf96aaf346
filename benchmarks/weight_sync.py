"""Send the weights of a 27M-parameter model to its engines under Ray, again and again.

    python benchmarks/weight_sync.py [--syncs 12] [--engines 1] [--ranks 1] [--stage 0] [--bucket N]

Qwen2-shaped, float32, 2 threads on the CPU. The first transfer makes the buffers; the others are
timed, from the announcement until all engines have taken the weights. The proof by log-probs is not
in it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from plimsoll.cluster.route import ActorRoute
from plimsoll.cluster.start import start_cluster
from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.engine import ModelConfig, TrainedRole
from plimsoll.config.rollout import RolloutConfig, SyncConfig
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.resolve.engine_rules import trainer_rules
from plimsoll.sampler.protocol import EngineSpec
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.trainer.worker import Worker
from plimsoll.trainer.zero.config import ZeroConfig


def main() -> None:
    """Run the syncs, and print the fastest, the median and the slowest."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(
            "qwen2", False, vocab=6656, hidden=512, layers=6, heads=8, kv_heads=8, feed_forward=1536
        )
        write_tiny_model(Path(folder), config, 0, make_tokenizer())
        seconds, sent = _time(options, folder)
    print(
        f"{options.engines} engine(s), {options.ranks} rank(s), stage {options.stage}: "
        f"{sent / 1e6:.0f} MB in {min(seconds):.3f} s at best, {statistics.median(seconds):.3f} "
        f"the median, {max(seconds):.3f} at most; {sent / min(seconds) / 1e9:.2f} GB/s"
    )


def _time(options: argparse.Namespace, model: str) -> tuple[list[float], int]:
    engine = VllmConfig(cpu_kv_cache_gib=0.25)
    rollout = RolloutConfig(
        dtype="float32", engines=options.engines, sync=SyncConfig(route="host")
    ).with_engine(engine)
    specs = [EngineSpec(i, model, 256, 2, "cpu", rollout) for i in range(options.engines)]
    zero = ZeroConfig(stage=options.stage)
    role = TrainedRole(
        model=ModelConfig(path=model, dtype="float32", attention="sdpa", kernels="own")
    ).with_engine(zero)
    role = role.with_engine(trainer_rules(role).decide(role))
    settings = ClusterConfig(device="cpu", ranks=options.ranks, threads=2)
    cluster = start_cluster(settings, specs)
    try:
        cluster.all(Worker.load_model, "actor", role, 1.0)
        route = ActorRoute(cluster, "actor", 256, specs[0].rollout)
        seconds = []
        for version in range(options.syncs + 1):
            begun = time.monotonic()
            sent = route.transfer(options.bucket, version)
            seconds.append(time.monotonic() - begun)
    finally:
        cluster.close()
    return seconds[1:], sent


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--syncs", type=int, default=12)
    add("--engines", type=int, default=1)
    add("--ranks", type=int, default=1)
    add("--bucket", type=int, default=2**28, help="bytes of a bucket")
    add("--stage", type=int, default=0, help="of ZeRO")
    return parser.parse_args()


if __name__ == "__main__":
    main()
