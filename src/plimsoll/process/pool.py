"""Children that run one program, started when they are needed, replaced when they end."""

from __future__ import annotations

from queue import LifoQueue
from typing import Any

from plimsoll.machine.meter import count_as_own
from plimsoll.process.child import Child, Program


class Pool:
    """A pool of at most `size` children of one program, for any thread.

    The last child that answered gets the next message, so messages one after another start no
    second child. A child that gave no answer is ended. A child that has ended is replaced.
    """

    def __init__(self, program: Program, size: int) -> None:
        self._program = program
        self._idle: LifoQueue[Child | None] = LifoQueue()  # None: one may yet be started
        self._running: set[Child] = set()
        self._closed = False
        for _ in range(size):
            self._idle.put(None)

    def ask(self, message: object, seconds: float) -> Any:
        """Return the answer of some child. Raises as `Child.ask`, and as `take`."""
        child = self.take()
        try:
            return child.ask(message, seconds)
        finally:
            self.give_back(child)

    def take(self) -> Child:
        """Return a child for the caller alone until it is given back; raises as `Child.open`."""
        child = self._idle.get()
        if child is not None and not child.has_ended():
            return child
        try:
            if child is not None:
                self._drop(child)
            return self._start()
        except BaseException:
            self._idle.put(None)
            raise

    def give_back(self, child: Child) -> None:
        """Let others have a child; end it if it owes an answer."""
        kept = child if child.is_idle else None
        if kept is None:
            self._drop(child)
        self._idle.put(kept)

    def close(self) -> None:
        """End all children. Whoever waits for an answer gets ChildEnded."""
        self._closed = True
        for child in tuple(self._running):
            child.end()

    def _drop(self, child: Child) -> None:
        child.end()
        self._running.discard(child)

    def _start(self) -> Child:
        child = Child(self._program)
        count_as_own(child.pid)
        self._running.add(child)
        if self._closed:  # by another thread, which may not have seen this child
            child.end()
        try:
            child.open()
        except BaseException:
            self._drop(child)
            raise
        return child
