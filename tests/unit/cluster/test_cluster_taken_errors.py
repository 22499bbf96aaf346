"""Calls that a dead engine leaves open: their errors are taken, so that Ray does not print them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plimsoll.cluster.ray import RayCluster, _OpenCalls
from plimsoll.cluster.ray_actors import Member
from plimsoll.cluster.ray_watch import HangWatch
from plimsoll.errors import EngineDied, PlimsollError


@dataclass(eq=False)
class Reference:
    """A call that has not ended."""

    taken: bool = False

    def future(self) -> None:
        self.taken = True


class Cluster:
    """What `_as_done` asks of its cluster, whose engine has died."""

    def __init__(self, watch: Reference) -> None:
        self._watches = {watch: cast(Member, "engine")}
        self._hangs = SimpleNamespace(
            watching=lambda call: nullcontext(lambda awaited, failed: watch)
        )

    def _what_ends_a_wait(self, busy: object) -> tuple[list[Any], _OpenCalls]:
        return [*self._watches], _OpenCalls()

    def _raise_failed(self, calls: _OpenCalls) -> None:
        pass

    def _death_error(self, watch: Reference) -> PlimsollError:
        return EngineDied("rollout engine 0 died")


def test_the_calls_that_a_death_leaves_open() -> None:
    """A large result is not fetched for its error."""
    calls, bucket = [Reference(), Reference()], Reference()
    pending = {call: cast(Member, "engine") for call in (*calls, bucket)}
    cluster = cast(RayCluster, Cluster(Reference()))
    with pytest.raises(EngineDied):
        list(RayCluster._as_done(cluster, "generate", pending, keep=[bucket]))
    assert [call.taken for call in calls] == [True, True] and not bucket.taken


def test_the_signs_that_were_asked_of_who_died() -> None:
    watch = HangWatch(1.0)
    dead, alive = (cast(Member, SimpleNamespace(name=name)) for name in ("dead", "alive"))
    of_dead, of_alive = Reference(), Reference()
    watch.add([dead, alive])
    watch._asked = {of_dead: dead, of_alive: alive}
    watch.remove([dead])
    assert (of_dead.taken, of_alive.taken) == (True, False)
    assert watch._asked == {of_alive: alive}
