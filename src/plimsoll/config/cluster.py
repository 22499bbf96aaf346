"""Where roles live."""

from __future__ import annotations

from typing import Literal

from plimsoll.config.base import PositiveFloat, PositiveInt, Settings


class ClusterConfig(Settings):
    """One process on a laptop, one node, or many."""

    where: Literal["local", "ray"] = "ray"
    """local: everything in this process, one rank, no Ray; ray: rank actors and engine actors."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA when there is a GPU."""
    ranks: PositiveInt = 1
    """Training ranks (data parallel): one per GPU, or CPU processes."""
    threads: PositiveInt | None = None
    """CPU threads of each rank and engine; default: the machine's cores divided among them."""
    address: str | None = None
    """A running Ray cluster's address; default: a cluster of this machine alone,
    ended with the run."""
    start_timeout: PositiveFloat = 600.0
    """Seconds that actors may take to start."""
