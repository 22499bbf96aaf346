"""Asking ranks and engines for signs of life while their calls are waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from plimsoll.cluster.ray_actors import Member
from plimsoll.cluster.vigil import Hang, Vigil, allowance

_EVERY_SECONDS = 5.0


class HangWatch:
    """Watches ranks and engines from `add` on. hang_timeout: `cluster.hang_timeout`.

    What ends soon costs nothing: nobody is asked before a wait has lasted for a while.
    """

    def __init__(self, hang_timeout: float | None) -> None:
        self._timeout = hang_timeout
        self._members: list[Member] = []
        self._asked: dict[Any, Member] = {}
        self._longest: dict[str, float] = {}
        self.every = min(_EVERY_SECONDS, (hang_timeout or _EVERY_SECONDS) / 4)

    def add(self, members: Sequence[Member]) -> None:
        """Watch these, too; nobody where it is switched off."""
        if self._timeout != 0:
            self._members += members

    @contextmanager
    def watching(self, call: str) -> Iterator[Wait]:
        """Within: calls of a method are waited for; how long nothing was heard meanwhile tells how
        long that may be the next time."""
        wait = Wait(self, allowance(self._timeout, call, self._longest.get(call)))
        yield wait
        self._longest[call] = max(self._longest.get(call, 0.0), wait.longest)

    def listen(self, vigil: Vigil) -> Vigil:
        """Take the answers that have come."""
        ready, _ = ray.wait([*self._asked], num_returns=max(1, len(self._asked)), timeout=0)
        for reference in ready:
            member = self._asked.pop(reference)
            try:
                vigil = vigil.answer(member.name, ray.get(reference))
            except RayError:  # it has died: others tell that
                continue
        return vigil

    def ask(self, vigil: Vigil) -> Vigil:
        """Ask all, but for those that are still to answer."""
        late = {member.name for member in self._asked.values()}
        for member in self._members:
            vigil = vigil.ask(member.name)
            if member.name not in late:
                self._asked[member.actor.sign.remote()] = member
        return vigil


def first_ended(references: Sequence[Any], timeout: float) -> Any:
    """The reference of the first call that ends; None where none does in time."""
    # Without fetch_local, a bucket that only passes by is not copied to this node.
    ready, _ = ray.wait(references, num_returns=1, timeout=timeout, fetch_local=False)
    return ready[0] if ready else None


class Wait:
    """A wait for some calls, during which members are watched. allowed: see `allowance`."""

    def __init__(self, watch: HangWatch, allowed: float) -> None:
        self._watch = watch
        self._allowed = allowed
        self._vigil = Vigil()
        self._asked_at = 0.0

    @property
    def longest(self) -> float:
        """The longest silence that has ended."""
        return self._vigil.longest

    def first(self, references: Sequence[Any]) -> Any:
        """The first of them that ends; or a Hang."""
        every = self._watch.every
        while True:
            start = time.monotonic()
            ended = first_ended(references, every)
            self._vigil = self._vigil.later(time.monotonic() - start, 2 * every)
            if ended is not None:
                self._vigil = self._vigil.move()
            hang = self._round() if self._vigil.now - self._asked_at >= every else None
            if hang is not None or ended is not None:
                return hang or ended

    def _round(self) -> Hang | None:
        heard = self._watch.listen(self._vigil)
        self._vigil, self._asked_at = self._watch.ask(heard), heard.now
        return heard.hang(self._allowed)
