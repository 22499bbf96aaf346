"""TensorBoard event files, written without torch or TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardWriter:
    """Writes scalars. A context manager: closing it puts the last ones on the disk.

    directory: where the event file goes; several parts of a run share it.
    first_step: what earlier event files hold from this step on is dropped by TensorBoard, so a
        resumed run shows each step once.
    """

    def __init__(self, directory: Path, first_step: int = 1) -> None:
        self._writer = EventFileWriter(str(directory))
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write one step's scalars and flush them."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()
