"""Memory that grows with every step: noticed, told from warming up, and named."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plimsoll.run.counting import counted, gigabytes_text
from plimsoll.run.ledger import LedgerRow, group_rows, is_node
from plimsoll.run.readings import Line

Where = Literal["host", "device"]
_BOTH: tuple[Where, ...] = ("host", "device")

WINDOW = 100
"""Steps that are looked at, at most."""

_CPU_WARM_UP, _CPU_FEWEST = 100, 60
"""On CPU a process that computes grows for about a hundred steps, while kernels keep what they
prepared for each new shape."""
_WARM_UP, _FEWEST = 10, 30

_NOISE = 6.0
"""Growth must be so many times the scatter about its line."""
_STEADY = 0.8
"""Both halves of a window must grow so nearly as fast as the whole."""
_SMALLEST = 4 * 2**20
_SMALLEST_SHARE = 0.005
"""Growth over a window that is worth a word: of both the larger."""


@dataclass(frozen=True)
class Leak:
    """phase: the one that most likely leaks. rate: bytes a step. steps_left: until the line, if it
    goes on so."""

    process: str
    phase: str
    where: Where
    rate: float
    steps_left: int

    @property
    def text(self) -> str:
        """For a person."""
        kind = "its card's" if self.where == "device" else "host"
        return (
            f"{self.process} holds {gigabytes_text(self.rate)} more {kind} memory with every step, "
            f"most likely from {self.phase}: a leak; about {counted(self.steps_left, 'step')} "
            "until the memory is full"
        )


def growth(held: Sequence[float]) -> float | None:
    """Bytes a step by which a process grows; None where it does not, or comes to rest.

    held: its bytes after each of at least 4 steps. The line of least squares must rise by more
    than the scatter about it and than what is worth a word, and both halves must rise nearly as
    fast as the whole: memory that warms up, or that jumps or climbs once, does not.
    """
    values = np.asarray(held, dtype=np.float64)
    rate, scatter = _line(values)
    risen = rate * (len(values) - 1)
    if risen < max(_NOISE * scatter, _SMALLEST, _SMALLEST_SHARE * values[0]):
        return None
    half = len(values) // 2
    (first, _), (second, _) = _line(values[:half]), _line(values[half:])
    return rate if min(first, second) >= _STEADY * rate else None


def _line(values: NDArray[np.float64]) -> tuple[float, float]:
    """The slope of the line of least squares, and the scatter of the values about it."""
    steps = np.arange(len(values)) - (len(values) - 1) / 2
    rest = values - values.mean()
    slope = float(steps @ rest / (steps @ steps))
    return slope, float(np.std(rest - slope * steps))


@dataclass
class _History:
    """One process. seen: steps since it started. levels: after each step; changes: by phase, what
    it added in each."""

    seen: int = 0
    levels: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    changes: dict[str, deque[int]] = field(default_factory=dict)

    def add(self, rows: Sequence[tuple[str, int]]) -> None:
        """rows: phases in their order, and what was held after each."""
        level = self.levels[-1] if self.levels else rows[0][1]
        for phase, held in rows:
            changes = self.changes.setdefault(phase, deque(maxlen=WINDOW))
            changes.append(held - level)
            level = held
        self.seen += 1
        self.levels.append(level)

    def phase_of(self, rate: float) -> str:
        """The phase that adds nearest to so much; others take and give back."""
        return min(self.changes, key=lambda phase: abs(fmean(self.changes[phase]) - rate))


class LeakWatch:
    """Follows the ledger; each process's leak on host or card is told once. Checkpoints, which not
    every step writes, are left out."""

    def __init__(self) -> None:
        self._histories: dict[tuple[str, Where], _History] = {}
        self._told: set[tuple[str, Where]] = set()

    def add(self, rows: Iterable[LedgerRow]) -> list[Leak]:
        """Take the rows of a step; returns the leaks that these show."""
        found: list[Leak] = []
        by_process = group_rows(
            (row for row in rows if row.phase != "save"), lambda row: row.process
        )
        for process, own in by_process.items():
            if is_node(own[0]):
                continue
            if any(row.phase == "load" for row in own):  # a new part of the run, with new processes
                for where in _BOTH:
                    self._histories.pop((process, where), None)
            places: tuple[Where, ...] = ("host",) if own[-1].held.allocated is None else _BOTH
            for where in places:
                line = (own if where == "device" else by_process[own[-1].node])[-1].line
                found += self._look(process, where, own, line)
        return found

    def _look(
        self, process: str, where: Where, rows: Sequence[LedgerRow], line: Line
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
    """What a `LeakWatch` would have told in the whole run."""
    watch = LeakWatch()
    return [leak for _, own in groupby(rows, lambda row: row.step) for leak in watch.add(own)]


def _patience(row: LedgerRow, where: Where) -> tuple[int, int]:
    """Steps to warm up, and to look at after them."""
    on_cpu = where == "host" and row.held.device is None and row.process != "recipe"
    return (_CPU_WARM_UP, _CPU_FEWEST) if on_cpu else (_WARM_UP, _FEWEST)
