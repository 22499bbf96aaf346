"""benchmarks/waiting_threads.py: threads spin on a quiet machine only, and the reader is told."""

from __future__ import annotations

import pytest

from waiting_threads import choose_waiting


@pytest.mark.parametrize(
    ("busy_cores", "spins", "told"),
    [
        (0.0, "300000", "0.00 cores are busy: the machine is quiet, so threads spin"),
        (0.19, "300000", "threads spin"),
        (1.0, "2000", "1.00 cores are busy with other work: threads sleep soon"),
        (63.9, "2000", "63.90 cores"),
    ],
)
def test_the_load_decides_how_threads_wait(busy_cores: float, spins: str, told: str) -> None:
    waiting = choose_waiting(busy_cores)
    assert waiting.environment == {"GOMP_SPINCOUNT": spins}
    assert told in str(waiting)
