"""Watch how much host memory the nodes of a run have left."""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll.run.counting import gigabytes_text
from plimsoll.run.readings import HostReading


def find_full_node(hosts: Iterable[HostReading], least_share: float) -> str | None:
    """Return a text on the fullest node with less than `least_share` of its memory left, or None.

    What counts is what processes could still get: free memory and the file caches that the kernel
    would give up, of the node or of the run's cgroup, whichever is less (see `HostMemory`).
    """
    fullest = max(hosts, key=lambda host: host.used / host.capacity, default=None)
    if fullest is None or fullest.capacity - fullest.used >= least_share * fullest.capacity:
        return None
    left, least = fullest.capacity - fullest.used, least_share * fullest.capacity
    return (
        f"{fullest.node} has {gigabytes_text(left)} of {gigabytes_text(fullest.capacity)} host "
        f"memory left, less than cluster.least_free_memory ({least_share:g}: "
        f"{gigabytes_text(least)})"
    )
