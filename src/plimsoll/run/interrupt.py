"""Ctrl-C, asked once: the run stops where nothing is lost; while it loads, that is at once. Asked
twice: it stops at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from plimsoll.run.output import tell

_MESSAGE = "\nstopping after this step; Ctrl-C again to stop at once"
_AT_ONCE_MESSAGE = "\nstopping"
_Handler = Callable[[int, FrameType | None], object] | int | None


class StopRequest:
    """A context manager in which SIGINT and SIGTERM set `requested`, which a recipe reads at its
    safe points. The second signal raises KeyboardInterrupt; while `at_once` is set, so does the
    first. Main thread only.
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
