"""Watch ranks and engines: ask them for signs of life while the run waits for their calls.

While they start, which gives no signs yet, name those for which a start waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from threading import Timer
from typing import Any

import ray
from ray.exceptions import RayError

from plimsoll.cluster.heartbeats import Hang, Heartbeats, allowance
from plimsoll.cluster.ray_actors import Member

_EVERY_SECONDS = 5.0
"""How often members are asked for a sign of life."""
_LOOK_SECONDS = 0.1
"""How long one call of `looking`'s function waits for a reference to end."""
_SLOW_SECONDS = 30.0


class HangWatch:
    """Watches ranks and engines for hangs, from `add` on; `hang_timeout` 0 switches it off."""

    def __init__(self, hang_timeout: float | None) -> None:
        self._timeout = hang_timeout
        self._every = min(_EVERY_SECONDS, (hang_timeout or _EVERY_SECONDS) / 4)
        self._members: list[Member] = []
        self._asked: dict[Any, Member] = {}
        self._asked_at = 0.0
        self._heartbeats = Heartbeats()
        self._longest: dict[str, float] = {}

    def add(self, members: Sequence[Member]) -> None:
        """Watch these members, too; do nothing if the watch is switched off."""
        if self._timeout != 0:
            self._members += members

    def remove(self, members: Sequence[Member]) -> None:
        """Watch these members no longer."""
        self._members = [member for member in self._members if member not in members]
        take_errors(reference for reference, member in self._asked.items() if member in members)
        self._asked = {r: member for r, member in self._asked.items() if member not in members}
        self._heartbeats = self._heartbeats.forget([member.name for member in members])

    @contextmanager
    def watching(self, call: str) -> Iterator[Callable[[Sequence[Any], Sequence[Any]], Any]]:
        """Yield a function that waits for calls and returns the first that ends, or a Hang.

        `call` is the method that all the calls are of. The function takes the calls' references,
        and a list to which another thread may add; once there is anything, it returns None.
        The longest silence inside the block decides how long a silence may last next time.
        """
        with self._allow_silence(call) as allowed:
            yield partial(self._first, allowed)

    @contextmanager
    def looking(
        self, call: str, future: Future[Any]
    ) -> Iterator[Callable[[Sequence[Any], bool], Any]]:
        """Yield a function that checks members while another thread waits for their calls.

        Call the function again and again, with references that must not end, and with whether a
        call has ended since the last time. It returns a reference that ended, a Hang, or None; and
        at once when the other thread's work, `future`, is done.
        """
        with self._allow_silence(call) as allowed:
            yield partial(self._look, allowed, future)

    @contextmanager
    def _allow_silence(self, call: str) -> Iterator[float]:
        """Yield how many seconds a silence may last in calls of a method; store the longest one."""
        self._heartbeats = self._heartbeats.begin()
        yield allowance(self._timeout, call, self._longest.get(call))
        self._longest[call] = max(self._longest.get(call, 0.0), self._heartbeats.longest)

    def _look(
        self, allowed: float, future: Future[Any], references: Sequence[Any], moved: bool
    ) -> Any:
        waits = not future.done()
        ended = self._wait(references, 0.0 if waits else _LOOK_SECONDS, future if waits else None)
        if moved:
            self._heartbeats = self._heartbeats.move()
        return ended or self._round(allowed)

    def _first(self, allowed: float, references: Sequence[Any], failed: Sequence[Any]) -> Any:
        while not failed:
            ended = self._wait(references, self._every)
            if ended is not None:
                self._heartbeats = self._heartbeats.move()
            hang = self._round(allowed)
            if hang is not None or ended is not None:
                return hang or ended
        return None

    def _wait(
        self, references: Sequence[Any], seconds: float, future: Future[Any] | None = None
    ) -> Any:
        """Return the result of `first_ended`, and advance the heartbeats' clock.

        A `future` is waited for first, for `_LOOK_SECONDS` at most.
        """
        start = time.monotonic()
        if future is not None:
            wait([future], _LOOK_SECONDS)
        ended = first_ended(references, seconds)
        self._heartbeats = self._heartbeats.later(time.monotonic() - start, 2 * self._every)
        return ended

    def _round(self, allowed: float) -> Hang | None:
        """Read the answers, ask again, and return a hang; None if there is none, or too early."""
        if self._heartbeats.now - self._asked_at < self._every:
            return None
        self._asked_at = self._heartbeats.now
        ready, _ = ray.wait([*self._asked], num_returns=max(1, len(self._asked)), timeout=0)
        for reference in ready:
            member = self._asked.pop(reference)
            with suppress(RayError):  # it has died, which other calls report
                self._heartbeats = self._heartbeats.answer(member.name, ray.get(reference))
        hang = self._heartbeats.hang(allowed)
        late = {member.name for member in self._asked.values()}
        for member in self._members:
            self._heartbeats = self._heartbeats.ask(member.name)
            if member.name not in late:
                self._asked[member.actor.sign.remote()] = member
        return hang


def take_errors(references: Iterable[Any]) -> None:
    """Take the errors of calls whose results nobody reads any more.

    Ray prints an error that nobody takes as "Unhandled error", long after the run has told of the
    death that ended the call, and gone on.
    """
    for reference in references:
        reference.future()


def first_ended(references: Sequence[Any], timeout: float) -> Any:
    """Return the reference of the first call that ends; None if none does in time."""
    # Without fetch_local, a bucket that only passes by is not copied to this node.
    ready, _ = ray.wait(references, num_returns=1, timeout=timeout, fetch_local=False)
    return ready[0] if ready else None


@contextmanager
def naming_slow_starts(
    late: Callable[[], Sequence[str]], say: Callable[[str], None]
) -> Iterator[None]:
    """Name the processes that have not started, if the block takes over 30 seconds.

    Args:
        late: returns the names of these processes.
        say: takes the line with the names.
    """
    timer = Timer(
        _SLOW_SECONDS,
        lambda: say(f"waiting for {', '.join(late())} to start, for {_SLOW_SECONDS:.0f} s now"),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
