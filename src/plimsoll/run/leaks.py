"""Watch host memory: nodes that are nearly full, and processes whose memory grows with every step.

A leak is reported with its process and phase.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plimsoll.run.ledger import LedgerRow, group_rows, is_node
from plimsoll.run.numbers import gigabytes_text, plural
from plimsoll.run.readings import HostReading, Line

LeakPlace = Literal["host", "device"]
_BOTH: tuple[LeakPlace, ...] = ("host", "device")

WINDOW = 100
"""The most steps that are looked at."""

_CPU_WARM_UP, _CPU_FEWEST = 100, 60
"""On CPU a process that computes grows for about a hundred steps, as kernels cache data for each
new tensor shape."""
_WARM_UP, _FEWEST = 10, 30

_NOISE = 6.0
"""Growth must be at least this multiple of the values' scatter about the fitted line."""
_STEADY = 0.8
"""Each half of a window must grow at this share of the window's rate, or faster."""
_SMALLEST = 4 * 2**20
_SMALLEST_SHARE = 0.005
"""The smallest growth in a window that is reported: the larger of `_SMALLEST` bytes and this share
of the first value."""


@dataclass(frozen=True)
class Leak:
    """A process that leaks memory on its host or card."""

    process: str
    phase: str
    """The phase that most likely leaks."""
    where: LeakPlace
    rate: float
    """Bytes per step."""
    steps_left: int
    """Steps until the memory is full at this rate."""

    @property
    def text(self) -> str:
        """A sentence about the leak, without its full stop."""
        kind = "its card's" if self.where == "device" else "host"
        return (
            f"{self.process} holds {gigabytes_text(self.rate)} more {kind} memory with every step, "
            f"most likely from {self.phase}: a leak; about {plural(self.steps_left, 'step')} "
            "until the memory is full"
        )


def growth(held: Sequence[float]) -> float | None:
    """Return the bytes per step by which a process grows steadily, or None if it does not.

    `held` are the process's bytes after each step, for at least 4 steps. The least-squares line
    must rise by more than `_NOISE` times the scatter about it, and by more than the smallest growth
    that counts. Each half must rise nearly as fast. So memory that warms up or jumps does not
    count.
    """
    values = np.asarray(held, dtype=np.float64)
    rate, scatter = _fit_line(values)
    risen = rate * (len(values) - 1)
    if risen < max(_NOISE * scatter, _SMALLEST, _SMALLEST_SHARE * values[0]):
        return None
    half = len(values) // 2
    (first, _), (second, _) = _fit_line(values[:half]), _fit_line(values[half:])
    return rate if min(first, second) >= _STEADY * rate else None


def _fit_line(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the slope of the least-squares line, and the standard deviation of the residuals."""
    steps = np.arange(len(values)) - (len(values) - 1) / 2
    rest = values - values.mean()
    slope = float(steps @ rest / (steps @ steps))
    return slope, float(np.std(rest - slope * steps))


@dataclass
class _History:
    """The bytes that one process held, step by step."""

    seen: int = 0
    """Steps since the process started."""
    levels: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Bytes after each step."""
    changes: dict[str, deque[int]] = field(default_factory=dict)
    """Bytes that each phase added, by phase, one value per step."""

    def add(self, rows: Sequence[tuple[str, int]]) -> None:
        """Add a step, given as (phase, bytes held after it) for its phases in order."""
        level = self.levels[-1] if self.levels else rows[0][1]
        for phase, held in rows:
            changes = self.changes.setdefault(phase, deque(maxlen=WINDOW))
            changes.append(held - level)
            level = held
        self.seen += 1
        self.levels.append(level)

    def phase_of(self, rate: float) -> str:
        """Return the phase whose mean change per step is nearest to `rate`."""
        return min(self.changes, key=lambda phase: abs(fmean(self.changes[phase]) - rate))


class LeakWatch:
    """Follows the ledger, without phase `save`; reports each process's host or card leak once."""

    def __init__(self) -> None:
        self._histories: dict[tuple[str, LeakPlace], _History] = {}
        self._told: set[tuple[str, LeakPlace]] = set()

    def add(self, rows: Iterable[LedgerRow]) -> list[Leak]:
        """Add the ledger rows of a step, and return the leaks that are detected with them."""
        leaks: list[Leak] = []
        by_process = group_rows(
            (row for row in rows if row.phase != "save"), lambda row: row.process
        )
        for process, process_rows in by_process.items():
            if is_node(process_rows[0]):
                continue
            if any(
                row.phase == "load" for row in process_rows
            ):  # a new part of the run, with new processes
                for where in _BOTH:
                    self._histories.pop((process, where), None)
            places: tuple[LeakPlace, ...] = (
                ("host",) if process_rows[-1].held.allocated is None else _BOTH
            )
            for where in places:
                line = (process_rows if where == "device" else by_process[process_rows[-1].node])[
                    -1
                ].line
                leaks += self._look(process, where, process_rows, line)
        return leaks

    def _look(
        self, process: str, where: LeakPlace, rows: Sequence[LedgerRow], line: Line
    ) -> Iterator[Leak]:
        key = (process, where)
        history = self._histories.setdefault(key, _History())
        held = [row.held.host if where == "host" else row.held.allocated or 0 for row in rows]
        history.add([(row.phase, size) for row, size in zip(rows, held, strict=True)])
        warm_up, fewest = _patience(rows[-1], where)
        if history.seen < warm_up + fewest or key in self._told:
            return
        rate = growth(list(history.levels)[-(history.seen - warm_up) :])
        if rate is not None:
            self._told.add(key)
            left = max(0, int((line.capacity - line.used) / rate))
            yield Leak(process, history.phase_of(rate), where, rate, left)


def find_leaks(rows: Iterable[LedgerRow]) -> list[Leak]:
    """Return the leaks that a `LeakWatch` reports for the ledger rows of all steps, in order."""
    watch = LeakWatch()
    return [
        leak
        for _, step_rows in groupby(rows, lambda row: row.step)
        for leak in watch.add(step_rows)
    ]


def _patience(row: LedgerRow, where: LeakPlace) -> tuple[int, int]:
    """Return how many steps count as warm-up, and how many later steps are needed to judge."""
    on_cpu = where == "host" and row.held.device is None and row.process != "controller"
    return (_CPU_WARM_UP, _CPU_FEWEST) if on_cpu else (_WARM_UP, _FEWEST)


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
