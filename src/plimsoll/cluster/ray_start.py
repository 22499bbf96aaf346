"""Ray itself, quiet, and with the run's own way to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from plimsoll.cluster.address import knock
from plimsoll.config.cluster import ClusterConfig
from plimsoll.errors import ConfigError


def start_ray(config: ClusterConfig) -> None:
    """Start Ray on this machine, or join `cluster.address`.

    Raises ConfigError where nothing answers there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray prints its reports of dead workers whatever log_to_driver says; ours name them.
    ray._private.worker._worker_logs_enabled = False
    try:
        if config.address is not None and config.address != "auto":
            knock(config.address)
        with _signal_handler_kept():
            ray.init(
                address=config.address or "local",
                include_dashboard=None if config.address else False,
                log_to_driver=False,
                logging_level="ERROR",
            )
    except (OSError, ValueError) as error:
        if config.address is None:
            raise
        raise ConfigError(
            f"cluster.address: no Ray cluster answers at {config.address!r} ({error}). Write "
            "host:port of its head node, or leave it out to run on this machine alone."
        ) from error


@contextmanager
def _signal_handler_kept() -> Iterator[None]:
    """Ray makes SIGTERM an exit at once; the run's own handler lets it save first."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
