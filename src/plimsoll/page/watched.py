"""A run as far as it has been read: what grows is read on, what is written anew is read anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from plimsoll.config.yaml_tree import read_tree
from plimsoll.errors import PlimsollError
from plimsoll.jobs.which import named_job
from plimsoll.page.follow import FilePosition, read_on
from plimsoll.page.ledger_sums import LedgerSums
from plimsoll.run.directory import RunDirectory, existing_run
from plimsoll.run.ending import RunEnd, read_end
from plimsoll.run.json_lines import JsonRow, read_rows
from plimsoll.run.ledger import read_ledger
from plimsoll.run.now import CurrentPhase, read_current_phase

AT_ONCE = 16 * 2**20
"""That is read of a file before anything is shown of it; bytes."""

Column = NDArray[np.float64]


@dataclass(frozen=True)
class MetricsTable:
    """The rows of metrics.jsonl.

    rows: `step` as whole numbers and all other numbers as floats. last: the last row as it is
    written, with None for NaN; so are the figures of all evaluations.
    """

    place: FilePosition = field(default_factory=FilePosition)
    rows: pa.Table = field(default_factory=lambda: pa.table({"step": pa.array([], pa.int64())}))
    last: JsonRow = field(default_factory=dict)
    evaluated: tuple[JsonRow, ...] = ()

    @property
    def names(self) -> dict[str, None]:
        """Of all metrics, in the order in which they first came; as a row without values."""
        return {name: None for name in self.rows.column_names if name != "step"}

    def column(self, name: str) -> Column:
        """A metric at every row, NaN where it is not there; shape [rows]."""
        if name not in self.rows.column_names:
            return np.full(len(self.rows), np.nan)
        column: Column = self.rows[name].to_numpy().astype(np.float64)
        return column

    def read_on(self, path: Path, most: int) -> MetricsTable:
        """With at most so many bytes more."""
        place = self.place.seen(path)
        more = read_on(path, place, most)
        before = self if place.offset else MetricsTable()
        if more is None:
            return replace(before, place=place)
        rows = pa.concat_tables([before.rows, _numbers(more.rows)], promote_options="default")
        lines = more.lines.splitlines()
        evaluated = [_evaluation(json.loads(line)) for line in lines if b'"eval/' in line]
        return MetricsTable(
            more.place,
            rows.combine_chunks(),
            json.loads(lines[-1]),
            (*before.evaluated, *evaluated),
        )


def _evaluation(row: JsonRow) -> JsonRow:
    return {name: row[name] for name in row if name == "step" or name.startswith("eval/")}


def _numbers(table: pa.Table) -> pa.Table:
    """Only those columns that are numbers; null alone is one that was never finite."""
    kept = {"step": table["step"].cast(pa.int64())}
    for name, column in zip(table.column_names, table.columns, strict=True):
        numeric = (pa.types.is_integer, pa.types.is_floating, pa.types.is_null)
        if name != "step" and any(is_one(column.type) for is_one in numeric):
            kept[name] = column.cast(pa.float64())
    return pa.table(kept)


@dataclass(frozen=True)
class Watched:
    """A run as far as it has been read.

    name: what tells it from the others. config: the text of config.yaml, "" where there is none.
    latest: the last step with trajectories. now: None where it does not go on. end: how it ended,
    where that is known. problem: why it cannot be read on; "" where it can.
    """

    run: RunDirectory
    name: str
    metrics: MetricsTable = field(default_factory=MetricsTable)
    ledger: LedgerSums = field(default_factory=LedgerSums)
    config: str = ""
    latest: int | None = None
    now: CurrentPhase | None = None
    end: RunEnd | None = None
    problem: str = ""

    def look(self, most: int = AT_ONCE) -> Watched:
        """The run with what has been written since, at most so many bytes of each file."""
        path = self.run.config_path
        latest = self.run.latest_trajectories()
        seen = replace(
            self,
            config=path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "",
            latest=latest and latest[0],
            now=read_current_phase(self.run.now_path),
            end=read_end(self.run.end_path),
            problem="",
        )
        try:
            metrics = self.metrics.read_on(self.run.metrics_path, most)
            seen = replace(seen, metrics=metrics)
            return replace(seen, ledger=self.ledger.read_on(self.run.ledger_path, most))
        except (PlimsollError, OSError, ValueError) as error:
            return replace(seen, problem=str(error))

    @property
    def unread(self) -> int:
        """Bytes that are there, less those of a line that is being written."""
        places = (self.metrics.place, self.ledger.place)
        return 0 if self.problem else sum(place.size - place.offset for place in places)

    @property
    def version(self) -> str:
        """Differs where anything but `now` does."""
        offsets = (self.metrics.place, self.ledger.place)
        marks = [f"{place.inode}.{place.offset}" for place in offsets]
        others = (str(self.latest), str(hash(self.config)), str(self.end), self.problem)
        return "-".join([*marks, *others])

    @cached_property
    def settings(self) -> Any:
        """Of config.yaml, as it is written; None where there is none, or it cannot be read."""
        try:
            return read_tree(self.config, str(self.run.config_path)).values
        except PlimsollError:
            return None

    @property
    def job(self) -> str | None:
        """That the config names."""
        return named_job(self.config)


def watch_runs(paths: Sequence[Path]) -> tuple[Watched, ...]:
    """The runs of these directories, of which nothing has been read; by the shortest ends of their
    paths that tell them apart.

    Raises ConfigError where one is no directory.
    """
    runs = [existing_run(path) for path in paths]
    names = _told_apart([run.path.resolve().parts for run in runs])
    return tuple(Watched(run, name) for run, name in zip(runs, names, strict=True))


def _told_apart(paths: Sequence[Sequence[str]]) -> list[str]:
    """The same directory twice has its number behind it."""
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(paths):
            return names
    return [f"{parts[-1]} ({i})" for i, parts in enumerate(paths, start=1)]


def read_whole_run(run: Watched) -> Watched:
    """All of a run. Raises what keeps it from being read."""
    seen = run.look()
    while (after := seen.look()).unread < seen.unread:
        seen = after
    if after.problem:
        read_rows(run.run.metrics_path)
        read_ledger(run.run.ledger_path)
        raise PlimsollError(after.problem)
    return after
