"""Start the cluster that a config asks for, on the run's device."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.cluster import ClusterConfig, Device, device_of
from plimsoll.machine.host import most_busy_processes, usable_cores
from plimsoll.sampler.protocol import EngineSpec
from plimsoll.trainer.process_group import check_device


def start_cluster(config: ClusterConfig, specs: Sequence[EngineSpec]) -> Cluster:
    """Start all training ranks and one rollout engine for each spec; return the cluster."""
    threads, device = thread_count(config, len(specs)), run_device(config, len(specs))
    if config.where == "local":
        from plimsoll.cluster.local import LocalCluster

        return LocalCluster(specs, threads, device, config.memory_halvings)
    from plimsoll.cluster.ray import RayCluster

    return RayCluster(config, specs, threads, device)


def thread_count(config: ClusterConfig, engines: int) -> int:
    """Return the number of CPU threads that each process gets."""
    if config.threads is not None:
        return config.threads
    return max(1, usable_cores() // most_busy_processes(config, engines))


def run_device(config: ClusterConfig, engines: int) -> Device:
    """Return the device of ranks and engines. Raises ConfigError for CUDA without a card."""
    if config.where == "local" or config.address is None:
        return check_device(device_of(config))
    from plimsoll.cluster.ray_start import device_of_joined_cluster

    return device_of_joined_cluster(config, engines)
