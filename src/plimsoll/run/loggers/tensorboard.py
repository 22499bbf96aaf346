"""TensorBoard's event files."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from plimsoll.run.files import append_whole, write_whole
from plimsoll.run.responses import SampledResponse

_NAME = re.compile(r"events\.out\.tfevents\.(\d+\.\d+)\.")


class TensorBoardLogger:
    """Writes scalars to an event file, at once for each step.

    TensorBoard's own writer is not used: if the disk is full, its thread ends with a traceback, one
    step late. A resumed run writes a new file in the same directory. TensorBoard ignores steps from
    `first_step` on in earlier files, so it shows each step once.
    """

    name = "TensorBoard"
    identity = ""
    has_tables = False

    def __init__(self, directory: Path, first_step: int = 1) -> None:
        now = time.time()
        # TensorBoard reads files in the order of their names, which begin with the time. So a new
        # name must be later than the old names, even if the clock went back.
        matches = (_NAME.match(path.name) for path in directory.glob("*"))
        begun = max([now, *(float(match[1]) + 1e-6 for match in matches if match)])
        name = f"events.out.tfevents.{begun:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = directory / name
        start = SessionLog(status=SessionLog.START)
        head = Event(wall_time=now, file_version="brain.Event:2")
        begin = Event(wall_time=now, step=first_step, session_log=start)
        write_whole(self._path, _record(head) + _record(begin))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of a step, or raise PlimsollError if the disk is full."""
        summaries = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=summaries))
        append_whole(self._path, _record(event))

    def responses(self, step: int, rows: Sequence[SampledResponse]) -> None:
        """Do nothing: TensorBoard has no tables."""

    def close(self, *, failed: bool) -> None:
        """Do nothing: everything is written."""


def _record(event: Event) -> bytes:
    buffer = BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
