"""Summarise the ledger of a run as it grows, and compare predicted with measured memory.

Sums are by process and phase. The comparison takes the maxima of all steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc

from plimsoll.errors import PlimsollError
from plimsoll.page.follow import FilePosition, read_on
from plimsoll.run.ledger import LedgerRow, group_rows, is_node, process_kind, read_ledger
from plimsoll.run.readings import Footprint, Line, largest

_SIZES = ("host", "allocated", "reserved", "device")
_FOOTPRINT = pa.struct([(f"{name}_bytes", pa.int64()) for name in _SIZES])
_SCHEMA = pa.schema(
    [
        *(("step", pa.int64()), ("phase", pa.string()), ("process", pa.string())),
        *(("node", pa.string()), ("predicted", _FOOTPRINT), ("measured", _FOOTPRINT)),
        ("line", pa.struct([("used_bytes", pa.int64()), ("capacity_bytes", pa.int64())])),
        *(("seconds", pa.float64()), ("at", pa.int64())),
    ]
)
_HOW = {
    "step": "last",
    "node": "last",
    **{f"predicted.{name}_bytes": "last" for name in _SIZES},
    **{f"measured.{name}_bytes": "max" for name in _SIZES},
    "line.used_bytes": "last",
    "line.capacity_bytes": "last",
    "seconds": "sum",
}
"""The function that reduces each column over the rows to one value; the last row is the fullest."""


@dataclass(frozen=True)
class LedgerSums:
    """The sums over the rows of a ledger that have been read so far."""

    place: FilePosition = field(default_factory=FilePosition)
    sums: pa.Table | None = None
    """One row for each process and phase."""

    def read_on(self, path: Path, most: int) -> LedgerSums:
        """Return the sums after reading at most `most` more bytes of a ledger.jsonl."""
        place = self.place.update(path)
        more = read_on(path, place, most, _SCHEMA)
        before = self if place.offset else LedgerSums()
        if more is None:
            return replace(before, place=place)
        rows, _, place = more
        if any(rows[name].null_count for name in ("phase", "process", "measured", "line")):
            read_ledger(path)  # names the line
            raise PlimsollError(f"{path} has rows that are none of a ledger.")
        flat = rows.flatten()
        steps = pc.coalesce(flat["at"], flat["step"])
        flat = flat.set_column(0, "step", steps).select(["process", "phase", *_HOW])
        sums = [] if before.sums is None else [before.sums]
        return LedgerSums(place, _sum_rows(pa.concat_tables([*sums, flat])))

    @property
    def rows(self) -> list[LedgerRow]:
        """One row for each process and phase, with the maxima and total seconds of the file's rows.

        `step`, `predicted` and `line` are of the row in which it was fullest, the last of several.
        """
        return [] if self.sums is None else [_row(values) for values in self.sums.to_pylist()]


def _sum_rows(rows: pa.Table) -> pa.Table:
    """Return a row for each process and phase, in the order in which they first appear."""
    fullest = pc.coalesce(rows["measured.device_bytes"], rows["measured.host_bytes"])
    places = pa.array(range(len(rows)), pa.int64())
    ordered = rows.append_column("fullest", fullest).append_column("place", places)
    ordered = ordered.sort_by([("fullest", "ascending"), ("place", "ascending")])
    grouped = ordered.group_by(["process", "phase"], use_threads=False)
    summed = grouped.aggregate([*_HOW.items(), ("place", "min")]).sort_by("place_min")
    names = {f"{name}_{how}": name for name, how in _HOW.items()}
    return summed.rename_columns([names.get(name, name) for name in summed.column_names]).select(
        ["process", "phase", *_HOW]
    )


def _row(values: Mapping[str, Any]) -> LedgerRow:
    predicted, measured = (_footprint(values, what) for what in ("predicted", "measured"))
    assert measured is not None
    return LedgerRow(
        step=values["step"],
        phase=values["phase"],
        process=values["process"],
        node=values["node"],
        predicted=predicted,
        measured=measured,
        held=measured,
        line=Line(values["line.used_bytes"], values["line.capacity_bytes"]),
        seconds=values["seconds"],
    )


def _footprint(values: Mapping[str, Any], what: str) -> Footprint | None:
    sizes = {name: values[f"{what}.{name}_bytes"] for name in _SIZES}
    return None if sizes["host"] is None else Footprint(**sizes)


Measure = Literal["host", "allocated", "reserved", "device"]
MEASURES: tuple[Measure, ...] = get_args(Measure)


@dataclass(frozen=True)
class Comparison:
    """One measure of one process in one phase, as the maximum over all steps, in bytes."""

    process: str
    phase: str
    measure: Measure
    predicted: int | None
    """The planned bytes; None if the plan has none."""
    measured: int
    seconds: float
    """Duration of the phase, summed over the rows."""

    @property
    def over(self) -> float | None:
        """Share by which measured exceeds predicted (0.1: 10% more); None without a prediction."""
        return None if not self.predicted else self.measured / self.predicted - 1


def compare(rows: Iterable[LedgerRow]) -> list[Comparison]:
    """Return the comparisons of all processes and phases by first appearance; nodes come last."""
    return [
        comparison
        for process_rows in group_rows(sorted(rows, key=is_node), lambda row: row.process).values()
        for phase_rows in group_rows(process_rows, lambda row: row.phase).values()
        for comparison in _comparisons(phase_rows)
    ]


def _comparisons(rows: Sequence[LedgerRow]) -> Iterable[Comparison]:
    measured, last = reduce(largest, [row.measured for row in rows]), rows[-1]
    seconds = sum(row.seconds for row in rows)
    for measure in MEASURES:
        size = getattr(measured, measure)
        if size is not None:
            predicted = None if last.predicted is None else getattr(last.predicted, measure)
            yield Comparison(last.process, last.phase, measure, predicted, size, seconds)


def drop_lone_nodes(rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    """Return the rows without those of nodes with one process: they repeat the process's rows."""
    processes: dict[str, set[str]] = {}
    for row in rows:
        if not is_node(row):
            processes.setdefault(row.node, set()).add(row.process)
    return [row for row in rows if not is_node(row) or len(processes[row.node]) > 1]


def fullest_of_kinds(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Return the comparisons of the fullest process of each kind in each phase."""
    fullest: dict[tuple[str, str], list[Comparison]] = {}
    for (process, phase), group in groupby(
        comparisons, lambda comparison: (comparison.process, comparison.phase)
    ):
        measures, key = list(group), (process_kind(process), phase)
        # The last is of the card, if there is one.
        if key not in fullest or measures[-1].measured > fullest[key][-1].measured:
            fullest[key] = measures
    return [comparison for measures in fullest.values() for comparison in measures]


def nearest_to_line(rows: Sequence[LedgerRow]) -> tuple[LedgerRow, LedgerRow]:
    """Return two rows: of the main process, and of the card or node nearest to its load line.

    For a card, all used bytes count; for a node, only those of this run. The main process is the
    process of the node that held most in that phase.
    """
    fullest = max(
        (row for row in rows if is_node(row) or row.measured.device is not None),
        key=lambda row: row.measured.fullest / row.line.capacity,
    )
    if not is_node(fullest):
        return fullest, fullest
    place = (fullest.process, fullest.phase)
    rows_there = (row for row in rows if (row.node, row.phase) == place and not is_node(row))
    return max(rows_there, key=lambda row: row.measured.host), fullest
