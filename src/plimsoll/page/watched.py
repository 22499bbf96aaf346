"""Read a run's directory again and again while the run goes on.

Growing files are read from where the last read ended. Other files are read anew each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from plimsoll.config.json_text import parse_json
from plimsoll.config.yaml_tree import read_tree
from plimsoll.errors import PlimsollError
from plimsoll.jobs.which import named_job
from plimsoll.page.follow import FilePosition, read_on
from plimsoll.page.ledger import LedgerSums
from plimsoll.run.directory import RunDirectory, existing_run, refuse_strange_files
from plimsoll.run.ending import RunEnd, read_end
from plimsoll.run.json_lines import JsonRow, read_rows
from plimsoll.run.ledger import read_ledger
from plimsoll.run.phases import CurrentPhase, read_current_phase

AT_ONCE = 16 * 2**20
"""The most bytes that are read of a file at a time, before the page shows them."""

Figures = NDArray[np.float64]


@dataclass(frozen=True)
class MetricsTable:
    """The rows of metrics.jsonl."""

    place: FilePosition = field(default_factory=FilePosition)
    rows: pa.Table = field(default_factory=lambda: pa.table({"step": pa.array([], pa.int64())}))
    """`step` as integers, all other numbers as floats."""
    last: JsonRow = field(default_factory=dict)
    """The last row as written, with None for NaN."""
    evaluated: tuple[JsonRow, ...] = ()
    """The figures of all evaluations, with None for NaN."""

    @property
    def names(self) -> dict[str, None]:
        """Names of all metrics by first appearance, as a row whose values are all None."""
        return {name: None for name in self.rows.column_names if name != "step"}

    def column(self, name: str) -> Figures:
        """Return a metric at every row, NaN where it is missing; shape [rows]."""
        if name not in self.rows.column_names:
            return np.full(len(self.rows), np.nan)
        column: Figures = self.rows[name].to_numpy().astype(np.float64)
        return column

    def read_on(self, path: Path, most: int) -> MetricsTable:
        """Return the table after reading at most `most` more bytes."""
        place = self.place.update(path)
        more = read_on(path, place, most)
        before = self if place.offset else MetricsTable()
        if more is None:
            return replace(before, place=place)
        new_rows, data, place = more
        rows = pa.concat_tables([before.rows, _numbers(new_rows)], promote_options="default")
        lines = data.splitlines()
        evaluated = [
            {n: x for n, x in _figures(line).items() if n == "step" or n.startswith("eval/")}
            for line in lines
            if b'"eval/' in line
        ]
        all_evaluated = (*before.evaluated, *evaluated)
        return MetricsTable(place, rows.combine_chunks(), _figures(lines[-1]), all_evaluated)


def _figures(line: bytes) -> JsonRow:
    """Return the numbers and nulls of a row; nobody else's values are shown."""
    values = parse_json(line).items()
    return {name: v for name, v in values if v is None or isinstance(v, int | float)}


def _numbers(table: pa.Table) -> pa.Table:
    """Return the columns that hold numbers; a column of nulls is a metric that was never finite."""
    kept = {"step": table["step"].cast(pa.int64())}
    for name, column in zip(table.column_names, table.columns, strict=True):
        checks = (pa.types.is_integer, pa.types.is_floating, pa.types.is_null)
        if name != "step" and any(is_kind(column.type) for is_kind in checks):
            kept[name] = column.cast(pa.float64())
    return pa.table(kept)


@dataclass(frozen=True)
class Watched:
    """The contents of a run's directory that have been read so far."""

    run: RunDirectory
    name: str
    """Shortest name that differs from those of the other runs on the page."""
    metrics: MetricsTable = field(default_factory=MetricsTable)
    ledger: LedgerSums = field(default_factory=LedgerSums)
    config: str = ""
    """Text of config.yaml; empty if there is none."""
    latest: int | None = None
    """Last step with trajectories."""
    now: CurrentPhase | None = None
    """Current phase; None if the run does not go on."""
    end: RunEnd | None = None
    """The end of the run, if it is known."""
    problem: str = ""
    """The reason why the run cannot be read further; empty if it can."""

    def look(self, most: int = AT_ONCE) -> Watched:
        """Return the run as it is after reading at most `most` more bytes of each growing file."""
        try:
            refuse_strange_files(self.run.path)  # they may have come since the last look
        except (PlimsollError, OSError) as error:
            return replace(self, problem=str(error))
        path = self.run.config_path
        seen = replace(
            self,
            config=path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "",
            latest=self.run.last_sampled_step(),
            now=read_current_phase(self.run.now_path),
            end=read_end(self.run.end_path),
            problem="",
        )
        try:
            metrics = self.metrics.read_on(self.run.metrics_path, most)
            seen = replace(seen, metrics=metrics)
            return replace(seen, ledger=self.ledger.read_on(self.run.ledger_path, most))
        except (PlimsollError, OSError, ValueError, pa.ArrowException) as error:
            return replace(seen, problem=str(error))

    @property
    def unread(self) -> int:
        """The number of bytes that are in the files and have not been read; 0 after a problem."""
        places = (self.metrics.place, self.ledger.place)
        return 0 if self.problem else sum(place.size - place.offset for place in places)

    @property
    def version(self) -> str:
        """A text that differs whenever anything but the current phase differs."""
        offsets = (self.metrics.place, self.ledger.place)
        marks = [f"{place.inode}.{place.offset}" for place in offsets]
        rest = (str(self.latest), str(hash(self.config)), str(self.end), self.problem)
        return "-".join([*marks, *rest])

    @cached_property
    def settings(self) -> Any:
        """The values of config.yaml as written; None if it is missing or cannot be read."""
        try:
            return read_tree(self.config, str(self.run.config_path)).values
        except PlimsollError:
            return None

    @property
    def job(self) -> str | None:
        """Name of the job that the config names, or None."""
        return named_job(self.config)


def watch_runs(paths: Sequence[Path]) -> tuple[Watched, ...]:
    """Return a run for each directory, with nothing read yet.

    Raises ConfigError if a directory is not a run's.
    """
    runs = [existing_run(path) for path in paths]
    names = _distinct_names([run.path.resolve().parts for run in runs])
    return tuple(Watched(run, name) for run, name in zip(runs, names, strict=True))


def _distinct_names(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return the shortest ends of the paths that are all distinct; equal paths get numbers."""
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(paths):
            return names
    return [f"{parts[-1]} ({i})" for i, parts in enumerate(paths, start=1)]


def read_whole_run(run: Watched) -> Watched:
    """Read all files of a run to their ends and return the run.

    Raises PlimsollError if a file cannot be read.
    """
    seen = run.look()
    while (after := seen.look()).unread < seen.unread:
        seen = after
    if after.problem:
        if run.run.metrics_path.is_file():
            read_rows(run.run.metrics_path)
        read_ledger(run.run.ledger_path)
        raise PlimsollError(after.problem)
    return after
