"""What a run computes on."""

from __future__ import annotations

from plimsoll.config.cluster import ClusterConfig, Device
from plimsoll.engine.process_group import choose_device


def run_device(config: ClusterConfig) -> Device:
    """What ranks and engines compute on. Raises ConfigError for CUDA that is not there."""
    if config.where == "local" or config.address is None:
        return choose_device(config.device)
    from plimsoll.cluster.ray_start import joined_device

    return joined_device(config)
