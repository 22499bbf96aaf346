"""The ledger of a run in constant space: sums by process and phase, and peaks by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from plimsoll.errors import PlimsollError
from plimsoll.page.follow import FilePosition, read_on
from plimsoll.run.ledger import LedgerRow, read_ledger
from plimsoll.run.readings import Footprint, Line

_SIZES = ("host", "allocated", "reserved", "device")
_FOOTPRINT = pa.struct([(f"{name}_bytes", pa.int64()) for name in _SIZES])
_SCHEMA = pa.schema(
    [
        *(("step", pa.int64()), ("phase", pa.string()), ("process", pa.string())),
        *(("node", pa.string()), ("predicted", _FOOTPRINT), ("measured", _FOOTPRINT)),
        ("line", pa.struct([("used_bytes", pa.int64()), ("capacity_bytes", pa.int64())])),
        ("seconds", pa.float64()),
    ]
)
_HOW = {
    "step": "last",
    "node": "last",
    **{f"predicted.{name}_bytes": "last" for name in _SIZES},
    **{f"measured.{name}_bytes": "max" for name in _SIZES},
    "line.used_bytes": "max",
    "line.capacity_bytes": "last",
    "seconds": "sum",
}
"""The function by which each column of several steps becomes one value."""


@dataclass(frozen=True)
class LedgerSums:
    """The sums of a ledger as far as it has been read."""

    place: FilePosition = field(default_factory=FilePosition)
    sums: pa.Table | None = None
    """One row for each process and phase."""
    peaks: pa.Table | None = None
    """Largest peak of each step and kind of process, in bytes. A step may have several rows."""

    def read_on(self, path: Path, most: int) -> LedgerSums:
        """Return the sums after reading at most `most` more bytes of a ledger.jsonl."""
        place = self.place.update(path)
        more = read_on(path, place, most, _SCHEMA)
        before = self if place.offset else LedgerSums()
        if more is None:
            return replace(before, place=place)
        if any(more.rows[name].null_count for name in ("phase", "process", "measured", "line")):
            read_ledger(path)  # names the line
            raise PlimsollError(f"{path} has rows that are none of a ledger.")
        flat = more.rows.flatten()
        sums = [] if before.sums is None else [before.sums]
        peaks = [] if before.peaks is None else [before.peaks]
        return LedgerSums(
            more.place,
            _sum_rows(pa.concat_tables([*sums, flat.select(["process", "phase", *_HOW])])),
            pa.concat_tables([*peaks, _peaks(flat)]),
        )

    @property
    def rows(self) -> list[LedgerRow]:
        """One row for each process and phase: maxima over all steps, seconds summed.

        `step` is the last step that has the phase.
        """
        return [] if self.sums is None else [_row(values) for values in self.sums.to_pylist()]

    def peaks_by_step(self) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """Return the steps, shape [S], and each kind's peaks in bytes, shape [S]."""
        if self.peaks is None:
            return np.array([]), {}
        steps, positions = np.unique(self.peaks["step"].to_numpy(), return_inverse=True)
        kinds, sizes = self.peaks["kind"].to_numpy(), self.peaks["bytes"].to_numpy()
        by_kind = {}
        for kind in pc.unique(self.peaks["kind"]).to_pylist():
            peaks, is_kind = np.full(len(steps), np.nan), kinds == kind
            np.fmax.at(peaks, positions[is_kind], sizes[is_kind].astype(np.float64))
            by_kind[kind] = peaks
        return steps.astype(np.float64), by_kind


def _sum_rows(rows: pa.Table) -> pa.Table:
    grouped = rows.group_by(["process", "phase"], use_threads=False)
    summed = grouped.aggregate(list(_HOW.items()))
    names = {f"{name}_{how}": name for name, how in _HOW.items()}
    return summed.rename_columns([names.get(name, name) for name in summed.column_names]).select(
        ["process", "phase", *_HOW]
    )


def _peaks(rows: pa.Table) -> pa.Table:
    fullest = pc.coalesce(rows["measured.device_bytes"], rows["measured.host_bytes"])
    kinds = pc.replace_substring_regex(rows["process"], r"\s*\d+$", "")
    table = pa.table({"step": rows["step"], "kind": kinds, "bytes": fullest})
    peaks = table.group_by(["step", "kind"], use_threads=False).aggregate([("bytes", "max")])
    return peaks.rename_columns({"bytes_max": "bytes"}).select(["step", "kind", "bytes"])


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
