"""What goes from ranks to engines: one call of each member, whatever the number of buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from plimsoll.cluster.ray import RayCluster
from plimsoll.sampler.protocol import RolloutEngine
from plimsoll.trainer.worker import Worker

Log = list[tuple[str, ...]]


@dataclass
class Member:
    """Writes down what it is called with; a result is what the call was of."""

    log: Log
    name: str

    @property
    def actor(self) -> Any:
        return SimpleNamespace(
            call=SimpleNamespace(remote=self.called), call_each=SimpleNamespace(remote=self.called)
        )

    def called(self, task: str, *of: object) -> str:
        self.log.append((self.name, task, *map(str, of)))
        return f"{task} of {self.name}"


@dataclass
class Transport:
    """What a `RayCluster` has two ranks and two engines for, without processes."""

    log: Log = field(default_factory=list)

    def __post_init__(self) -> None:
        self._engines = [Member(self.log, f"engine {i}") for i in range(2)]
        self.members = [Member(self.log, f"rank {i}") for i in range(2)]

    def _as_done(
        self, call: str, pending: dict[str, Member], keep: Sequence[str]
    ) -> Iterator[tuple[str, Any]]:
        self.log.append(("wait", call, *keep))
        yield from [(reference, None if reference in keep else reference) for reference in pending]

    def _wait(self, call: str, calls: dict[str, Member]) -> list[str]:
        self.log.append(("wait", call, *calls))
        return [*calls]

    def engines_do(self, task: Any, *arguments: object) -> list[str]:
        return [member.called(task.__name__, *arguments) for member in self._engines]


def test_all_buckets_are_one_call_of_each_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda value: value)
    transport = Transport()
    buckets: list[tuple[object, ...]] = [("a",), ("b",), ("c",)]
    RayCluster.stream(
        cast(RayCluster, transport), Worker.weight_bucket, buckets, RolloutEngine.receive
    )
    sent, received = "[('a',), ('b',), ('c',)]", "[(), (), ()]"
    assert transport.log == [
        *((f"rank {i}", "weight_bucket", sent) for i in range(2)),
        *((f"engine {i}", "receive", received) for i in range(2)),
        (
            *("wait", "receive", "weight_bucket of rank 0", "weight_bucket of rank 1"),
            *("receive of engine 0", "receive of engine 1"),
        ),
    ]


def test_what_the_first_rank_returns_goes_to_the_engines_unopened() -> None:
    transport = Transport()
    take: Any = RolloutEngine.take_adapter
    answer = RayCluster.hand_over(
        cast(RayCluster, transport), Worker.adapter_files, ("actor", 3), take
    )
    first = "adapter_files of rank 0"
    assert ("wait", "adapter_files", first) in transport.log
    assert transport.log[-2:] == [(f"engine {i}", "take_adapter", first) for i in range(2)]
    assert answer == "take_adapter of engine 0"
