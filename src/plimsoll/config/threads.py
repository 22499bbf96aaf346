"""How the threads of a process wait for one another."""

from __future__ import annotations

import os


def waiting() -> dict[str, str]:
    """For the environment of a process, before it imports torch: a thread that waits spins for some
    microseconds only, and then sleeps, unless this process's environment says otherwise. Spinning
    on, it would hold a core that another process, or another thread of its own, could use
    (docs/performance.md).
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return {}
    return {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000")}
