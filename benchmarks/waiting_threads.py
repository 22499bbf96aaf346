"""How the threads of OpenMP wait for one another in a comparison: they spin if nothing else runs.

A thread that spins goes on sooner, but it keeps a core from every other process. On two cores
beside one busy process, SFT of a 135M model made 17 tokens a second with spinning threads, and 231
with threads that sleep; on a quiet machine spinning is the faster of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

QUIET_CORES = 0.2
"""So little of a core may other processes use on a machine that counts as quiet."""
_LOOK_SECONDS = 3.0


@dataclass(frozen=True)
class Waiting:
    """How threads wait, for all runs of a comparison.

    Attributes:
        spins: how often a thread looks before it sleeps; Plimsoll's own choice is 2,000.
        busy_cores: what other processes used of the machine's cores before the first run.
    """

    spins: int
    busy_cores: float

    @property
    def environment(self) -> dict[str, str]:
        """The environment variable for both sides."""
        return {"GOMP_SPINCOUNT": str(self.spins)}

    def __str__(self) -> str:
        if self.spins == _SPINNING:
            return f"{self.busy_cores:.2f} cores are busy: the machine is quiet, so threads spin"
        return (
            f"{self.busy_cores:.2f} cores are busy with other work: threads sleep soon, on both "
            f"sides. On a quiet machine (below {QUIET_CORES} cores) they spin, which is faster"
        )


_SPINNING, _SLEEPING = 300_000, 2_000


def choose_waiting(busy_cores: float) -> Waiting:
    """Return how threads are to wait on a machine of which others use so many cores."""
    return Waiting(_SPINNING if busy_cores < QUIET_CORES else _SLEEPING, busy_cores)


def measure_busy_cores() -> float:
    """Return how many cores are busy now, while this process waits."""
    share: float = psutil.cpu_percent(_LOOK_SECONDS) / 100
    return share * psutil.cpu_count()
