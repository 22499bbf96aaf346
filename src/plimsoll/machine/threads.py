"""How many processes share a machine's cores, and how the threads of one wait for one another."""

from __future__ import annotations

import os
from math import ceil

from plimsoll.config.cluster import ClusterConfig


def most_at_once(cluster: ClusterConfig, engines: int) -> int:
    """The processes of a node that compute at the same time, at most. Ranks, the critic's own ranks
    and engines take turns: while one kind works the others wait."""
    return ceil(max(cluster.ranks, cluster.critic_ranks or 0, engines) / cluster.nodes)


def waiting() -> dict[str, str]:
    """For the environment of a process, before it imports torch: a thread that waits spins for some
    microseconds only, and then sleeps, unless this process's environment says otherwise. Spinning
    on, it would hold a core that another process, or another thread of its own, could use
    (docs/performance.md).
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return {}
    return {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000")}
