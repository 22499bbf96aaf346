"""Start the cluster that a config asks for, on the device that it computes on."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.cluster import ClusterConfig, Device
from plimsoll.engine.process_group import choose_device
from plimsoll.machine.host import most_busy_processes, usable_cores
from plimsoll.rollout.protocol import EngineSpec


def start_cluster(config: ClusterConfig, specs: Sequence[EngineSpec]) -> Cluster:
    """All training ranks and one engine for each spec (none for SFT)."""
    threads = thread_count(config, len(specs))
    if config.where == "local":
        from plimsoll.cluster.local import LocalCluster

        return LocalCluster(config, specs, threads)
    from plimsoll.cluster.ray import RayCluster

    return RayCluster(config, specs, threads)


def thread_count(config: ClusterConfig, engines: int) -> int:
    """CPU threads of each process."""
    if config.threads is not None:
        return config.threads
    return max(1, usable_cores() // most_busy_processes(config, engines))


def run_device(config: ClusterConfig) -> Device:
    """What ranks and engines compute on. Raises ConfigError for CUDA that is not there."""
    if config.where == "local" or config.address is None:
        return choose_device(config.device)
    from plimsoll.cluster.ray_start import joined_device

    return joined_device(config)
