"""A step's report, written once to every place that keeps or shows it."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from plimsoll.run.directory import RunDirectory
from plimsoll.run.files import append_whole, write_whole
from plimsoll.run.health import HealthWatch
from plimsoll.run.json_lines import append_row
from plimsoll.run.ledger import LedgerRow, write_ledger
from plimsoll.run.progress import Progress
from plimsoll.run.responses import read_groups, widest
from plimsoll.run.step_report import StepReport

_NAME = re.compile(r"events\.out\.tfevents\.(\d+\.\d+)\.")


class TensorBoardWriter:
    """Writes scalars, each step's at once: TensorBoard's own writer has a thread for it, which ends
    with a traceback where the disk is full, and is heard of a step later.

    directory: where the event file goes; several parts of a run share it.
    first_step: what earlier event files hold from this step on is dropped by TensorBoard, so a
        resumed run shows each step once.
    """

    def __init__(self, directory: Path, first_step: int = 1) -> None:
        now = time.time()
        # TensorBoard reads files in the order of their names, that is of their beginning; the clock
        # may have gone back since, or be that of another machine.
        begun = max([now, *(begun + 1e-6 for begun in _beginnings(directory))])
        name = f"events.out.tfevents.{begun:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = directory / name
        start = SessionLog(status=SessionLog.START)
        head = Event(wall_time=now, file_version="brain.Event:2")
        begin = Event(wall_time=now, step=first_step, session_log=start)
        write_whole(self._path, _record(head) + _record(begin))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write one step's scalars."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        append_whole(self._path, _record(event))


def _beginnings(directory: Path) -> list[float]:
    """What the names of the event files that are there say."""
    return [float(match[1]) for path in directory.glob("*") if (match := _NAME.match(path.name))]


def _record(event: Event) -> bytes:
    buffer = BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


@dataclass(frozen=True)
class MetricsSink:
    """metrics.jsonl, TensorBoard (where wanted) and the progress display, as one. health: None of
    a run whose figures have no healthy ranges."""

    directory: RunDirectory
    progress: Progress
    tensorboard: TensorBoardWriter | None = None
    health: HealthWatch | None = None

    def write(self, report: StepReport) -> None:
        """Write the step's row, show it, and warn of what is not healthy."""
        scalars = scalars_of(report)
        append_row(self.directory.metrics_path, {"step": report.step, **scalars})
        if self.tensorboard is not None:
            self.tensorboard.write(report.step, scalars)
        sampled = self.directory.trajectories_path(report.step)
        if self.progress.shows_responses and sampled.is_file():
            self.progress.sampled(widest(read_groups(sampled)))
        self.progress.update(report)
        if self.health is not None:
            for warning in self.health.add(report.step, report.metrics):
                self.progress.note(str(warning))

    def write_ledger(self, rows: Sequence[LedgerRow]) -> None:
        """Write rows of the ledger, all of one step."""
        write_ledger(self.directory.ledger_path, rows)
        if self.tensorboard is not None and rows:
            scalars = {f"memory/{r.process}/{r.phase}": float(r.measured.fullest) for r in rows}
            self.tensorboard.write(rows[0].step, scalars)


def scalars_of(report: StepReport) -> dict[str, float]:
    """The report as a flat row: the metrics by their names, then `tokens`, `tokens_per_second`,
    `seconds/<phase>` and `memory_bytes/<process>`."""
    measured = {
        "tokens": float(report.tokens),
        "tokens_per_second": report.tokens_per_second,
        **{f"seconds/{phase}": seconds for phase, seconds in report.seconds.items()},
        **{f"memory_bytes/{name}": float(use.measured) for name, use in report.memory.items()},
    }
    taken = {"step", *measured} & set(report.metrics)
    assert not taken, f"metrics must not be named {sorted(taken)}"
    return {**report.metrics, **measured}
