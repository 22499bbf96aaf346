"""Ctrl-C.

The first stops the run at a point where nothing is lost, or at once while it loads. The second
stops it at once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from plimsoll.run.output import tell

_MESSAGE = "\nstopping after this step; Ctrl-C again to stop at once"
_AT_ONCE_MESSAGE = "\nstopping"
_Handler = Callable[[int, FrameType | None], object] | int | None


class StopRequest:
    """A context manager in which SIGINT and SIGTERM set `requested`.

    The loop reads it at its safe points. The second signal raises KeyboardInterrupt; while
    `at_once` is set, the first one does. It works in the main thread only.
    """

    def __init__(self) -> None:
        self.requested = False
        self.at_once = False
        self._previous: dict[signal.Signals, _Handler] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        tell(_AT_ONCE_MESSAGE if self.at_once else _MESSAGE)
        if self.at_once:
            raise KeyboardInterrupt
