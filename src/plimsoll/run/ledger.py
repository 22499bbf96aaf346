"""The ledger of a run: predicted and measured memory of each process in each phase.

Each step has a row for each phase and process, and for each phase and node. The file has those in
which a maximum of the process in the phase moves, so that it does not grow with every step. Phases
before the first step (data, load, the first sync) are in the rows of the first step, or of step 0
if there is an evaluation before training. Saving a checkpoint is in the rows of its step.

Host memory is watched, too: nodes that are nearly full, and processes whose memory grows with every
step. A leak is reported with its process and phase.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from sys import intern
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import ConfigError
from plimsoll.run.json_lines import JsonRow, append_rows, iter_rows
from plimsoll.run.numbers import gigabytes_text, plural, use_text
from plimsoll.run.readings import (
    DividedShare,
    Footprint,
    Footprints,
    HostReading,
    Line,
    Reading,
    largest,
    total,
)


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """The memory of one process in one phase of one step."""

    step: int
    phase: str
    process: str
    """`controller`, `rank 0`, `critic rank 0`, `engine 0`, or `local` if all is one process.

    `node 0` stands for all measured processes of a machine; its peak is the sum of their peaks.
    """
    node: str
    """The machine of the process, such as `node 0`: the `process` of that machine's row."""
    predicted: Footprint | None
    """The peak that the plan predicted; None for phases that are not in the plan."""
    measured: Footprint
    """The peak within the phase."""
    held: Footprint
    """The memory at the end of the phase."""
    line: Line
    """Fill and capacity of the process's card, or of its node on CPU."""
    seconds: float
    """Duration of the phase."""
    shares: tuple[DividedShare, ...] = ()
    """The rank's shares of the roles that ZeRO divides; only in rows of `load`."""
    busy: float | None = None
    """Share of the phase's time in which the card computed; None if unknown."""
    at: int | None = None
    """The step that was measured, if it is an earlier one: such rows end a part of a run."""


def is_node(row: LedgerRow) -> bool:
    """Return whether a row describes a node, that is all its processes together."""
    return row.process.startswith("node ")


def process_kind(process: str) -> str:
    """Return the kind of a process, such as `critic rank` for `critic rank 3`."""
    return process.rstrip("0123456789").rstrip()


def group_rows(
    rows: Iterable[LedgerRow], key: Callable[[LedgerRow], str]
) -> dict[str, list[LedgerRow]]:
    """Return lists of rows by their key, in the order in which the keys first appear."""
    groups: dict[str, list[LedgerRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


@dataclass(frozen=True)
class MemoryUse:
    """A process's peak in a step, on its card or, on CPU, on its host; bytes."""

    measured: int
    predicted: int | None

    @property
    def text(self) -> str:
        """Measured and predicted, such as `1.9 of 2.1 GB`."""
        return use_text(self.measured, self.predicted)


def memory_use(rows: Iterable[LedgerRow]) -> dict[str, MemoryUse]:
    """Return the largest memory use among all phases of the fullest process of each kind, by name.

    Processes come first, then the fullest node.
    """
    by_kind = group_rows(sorted(rows, key=is_node), lambda row: process_kind(row.process))
    used: dict[str, MemoryUse] = {}
    for kind_rows in by_kind.values():
        fullest = max(kind_rows, key=lambda row: row.measured.fullest)
        own_rows = [row for row in kind_rows if row.process == fullest.process]
        predicted = [row.predicted.fullest for row in own_rows if row.predicted is not None]
        used[fullest.process] = MemoryUse(fullest.measured.fullest, max(predicted, default=None))
    return used


def busy_share(rows: Iterable[LedgerRow]) -> float | None:
    """Return the share of all rows' time in which cards computed; None if no row knows it."""
    known_shares = [(row.busy, row.seconds) for row in rows if row.busy is not None]
    seconds = sum(s for _, s in known_shares)
    return sum(busy * s for busy, s in known_shares) / seconds if seconds else None


class Ledger:
    """The ledger rows of the step in progress, by phase and process.

    `step` is the last step that ended; -1 before step 0, if there is a step 0.
    """

    def __init__(self, predicted: Mapping[str, Footprints], step: int) -> None:
        self._predicted = predicted
        self.step = step
        self._nodes: dict[str, str] = {}
        self._rows: dict[tuple[str, str], LedgerRow] = {}

    def add(self, phase: str, readings: Mapping[str, Reading], seconds: float) -> None:
        """Add the readings of each process at the end of a phase.

        If a step has a phase several times, its rows are merged: peaks are the larger, times add.
        """
        for row in self._read(phase, readings, seconds):
            key = (phase, row.process)
            before = self._rows.get(key)
            self._rows[key] = row if before is None else _join(before, row)

    def take(self, step: int) -> list[LedgerRow]:
        """Return the rows of a step that has ended, and begin the next step without rows."""
        self.step = step
        rows = [replace(row, step=step) for row in self._rows.values()]
        self._rows.clear()
        return rows

    def phases(self) -> set[str]:
        """Return the names of the phases that were added since the last `take`."""
        return {phase for phase, _ in self._rows}

    def _read(self, phase: str, readings: Mapping[str, Reading], seconds: float) -> list[LedgerRow]:
        lines = _node_lines(readings)
        rows = [
            LedgerRow(
                step=0,
                phase=phase,
                process=name,
                node=self._nodes.setdefault(reading.host.node, f"node {len(self._nodes)}"),
                predicted=self._predicted.get(name, {}).get(phase),
                measured=reading.peak,
                held=reading.held,
                line=lines[reading.host.node] if reading.card is None else reading.card.line,
                seconds=seconds,
                shares=reading.shares if phase == "load" else (),
                busy=None if reading.card is None else reading.card.busy,
            )
            for name, reading in readings.items()
        ]
        by_node = group_rows(rows, lambda row: row.node)
        nodes = [_node_row(by_node[self._nodes[node]], line) for node, line in lines.items()]
        return rows + nodes


def _node_lines(readings: Mapping[str, Reading]) -> dict[str, Line]:
    """Return the bytes in use at the peak, and the capacity, of each machine by its name.

    The bytes are an upper bound: the current use, plus the amount by which each process's peak was
    above its current memory. The peaks may not have coincided.
    """
    by_node: dict[str, list[HostReading]] = {}
    for reading in readings.values():
        by_node.setdefault(reading.host.node, []).append(reading.host)
    lines: dict[str, Line] = {}
    for name, hosts in by_node.items():
        above_now = sum(host.peak - host.held for host in hosts)
        lines[name] = Line(max(host.used for host in hosts) + above_now, hosts[0].capacity)
    return lines


def _node_row(rows: Sequence[LedgerRow], line: Line) -> LedgerRow:
    """Return the row of a node, from the rows of all its processes."""
    name = rows[0].node
    predicted = [row.predicted for row in rows if row.predicted is not None]
    return replace(
        rows[0],
        process=name,
        predicted=total(predicted) if len(predicted) == len(rows) else None,
        measured=total([row.measured for row in rows]),
        held=total([row.held for row in rows]),
        line=line,
        shares=(),
        busy=None,
    )


def _join(before: LedgerRow, row: LedgerRow) -> LedgerRow:
    return replace(
        row,
        measured=largest(before.measured, row.measured),
        line=max(before.line, row.line, key=lambda line: line.used / line.capacity),
        seconds=before.seconds + row.seconds,
        busy=busy_share([before, row]),
    )


_MOVED = 0.01
"""A maximum moves if it rises by more than this share of what the file has."""


class LedgerFile:
    """The writer of a ledger.jsonl, which adds the rows in which a maximum moves.

    So a maximum of the file is at most `_MOVED` too low while the run goes on, and exact after
    `finish`. The file's rows are at most a few hundred for each process and phase.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._step = 0
        self._written: dict[tuple[str, str], Footprint] = {}
        self._largest: dict[tuple[str, str], LedgerRow] = {}

    def add(self, rows: Iterable[LedgerRow]) -> None:
        """Append those rows of a step in which a maximum moves."""
        moved = []
        for row in rows:
            key, self._step = (row.process, row.phase), row.step
            largest_row = self._largest.get(key)
            if largest_row is None or _has_risen(largest_row.measured, row.measured):
                self._largest[key] = _larger(largest_row, row)
                written = self._written.get(key)
                if written is None or _has_risen(written, row.measured, _MOVED):
                    moved.append(row)
                    self._written[key] = largest(written or row.measured, row.measured)
        write_ledger(self._path, moved)

    def finish(self) -> None:
        """Append the maxima that have risen since they were written, with the step of each."""
        rest = [
            replace(row, step=self._step, at=row.step)
            for key, row in self._largest.items()
            if _has_risen(self._written[key], row.measured)
        ]
        write_ledger(self._path, rest)
        self._written = {key: row.measured for key, row in self._largest.items()}


def _has_risen(before: Footprint, now: Footprint, share: float = 0.0) -> bool:
    """Return whether a measure is larger than before by more than a share of it."""
    pairs = zip(_sizes(before), _sizes(now), strict=True)
    return any(size is not None and size > (1 + share) * (old or 0) for old, size in pairs)


def _sizes(footprint: Footprint) -> tuple[int | None, ...]:
    return footprint.host, footprint.allocated, footprint.reserved, footprint.device


def _larger(before: LedgerRow | None, row: LedgerRow) -> LedgerRow:
    """Return the fuller one of two rows, with the larger measures of both."""
    if before is None:
        return row
    fuller = max(before, row, key=lambda either: either.measured.fullest)
    return replace(fuller, measured=largest(before.measured, row.measured))


def write_ledger(path: Path, rows: Iterable[LedgerRow]) -> None:
    """Append rows to a ledger.jsonl."""
    append_rows(path, map(_row_values, rows))


def _row_values(row: LedgerRow) -> JsonRow:
    return {
        "step": row.step,
        "phase": row.phase,
        "process": row.process,
        "rank": int(last) if (last := row.process.rpartition(" ")[2]).isdigit() else None,
        "node": row.node,
        "predicted": None if row.predicted is None else _values(row.predicted),
        "measured": _values(row.measured),
        "held": _values(row.held),
        "line": _values(row.line),
        "seconds": round(row.seconds, 4),
        **({"shares": [asdict(share) for share in row.shares]} if row.shares else {}),
        **({} if row.busy is None else {"busy": round(row.busy, 3)}),
        **({} if row.at is None else {"at": row.at}),
    }


def _values(numbers: Footprint | Line) -> dict[str, int]:
    return {f"{name}_bytes": size for name, size in asdict(numbers).items() if size is not None}


def read_ledger(path: Path) -> list[LedgerRow]:
    """Return the rows of a ledger.jsonl.

    Raises ConfigError if there is no file or no row, or if a row is wrong.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path} is not there: no step of the run has ended yet, or {path.parent} is no run "
            f"directory. Give the run.directory of a run that has done a step."
        )
    rows = [_parse(path, number, row) for number, row in enumerate(iter_rows(path), start=1)]
    if not rows:
        raise ConfigError(f"{path} has no rows yet: no step of the run has ended.")
    return rows


def _parse(path: Path, number: int, row: Mapping[str, Any]) -> LedgerRow:
    try:
        return LedgerRow(
            step=row["step"],
            phase=intern(row["phase"]),
            process=intern(row["process"]),
            node=intern(row["node"]),
            predicted=None if row["predicted"] is None else _footprint(row["predicted"]),
            measured=_footprint(row["measured"]),
            held=_footprint(row["held"]),
            line=Line(*(int(row["line"][f"{name}_bytes"]) for name in ("used", "capacity"))),
            seconds=float(row["seconds"]),
            shares=tuple(DividedShare(**share) for share in row.get("shares", ())),
            busy=row.get("busy"),
            at=row.get("at"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}, line {number}: no row of a ledger ({error!r}). Remove the line."
        ) from error


def _footprint(values: Mapping[str, int]) -> Footprint:
    return Footprint(**{name.removesuffix("_bytes"): int(size) for name, size in values.items()})


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
        steady = (row for row in rows if row.phase != "save")
        by_process = group_rows(steady, lambda row: row.process)
        for process, process_rows in by_process.items():
            last = process_rows[-1]
            if is_node(last):
                continue
            if any(row.phase == "load" for row in process_rows):  # the processes are new
                for where in _BOTH:
                    self._histories.pop((process, where), None)
            for where in _BOTH if last.held.allocated is not None else _BOTH[:1]:
                line = last.line if where == "device" else by_process[last.node][-1].line
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


def read_leaks(path: Path) -> list[Leak]:
    """Return the leaks in a leaks.jsonl, whose rows have the step that showed them, too.

    Raises ConfigError if a row is wrong.
    """
    rows = iter_rows(path) if path.is_file() else ()
    try:
        return [
            Leak(r["process"], r["phase"], r["where"], float(r["rate"]), int(r["steps_left"]))
            for r in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} has a row that is no leak ({error!r}). Remove it.") from error


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
