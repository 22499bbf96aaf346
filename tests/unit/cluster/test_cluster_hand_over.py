"""Buckets from ranks to engines: while one is received, the next is gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from plimsoll.cluster.ray import RayCluster
from plimsoll.sampler.protocol import RolloutEngine
from plimsoll.trainer.worker import Worker

Log = list[tuple[str, ...]]


@dataclass
class Member:
    """Writes down what it is called with; a result is what the call was of."""

    log: Log
    name: str = ""

    @property
    def actor(self) -> Any:
        return SimpleNamespace(call=SimpleNamespace(remote=self.called))

    def called(self, task: str, *of: str) -> str:
        self.log.append(("call", task, *of))
        return f"{task} of {', '.join(of)}{self.name}"


@dataclass
class Transport:
    """What `hand_over` asks of its cluster, without processes."""

    ranks: int = 1
    log: Log = field(default_factory=list)

    def __post_init__(self) -> None:
        self._engines = [Member(self.log)]
        names = [f" of rank {rank}" for rank in range(self.ranks)] if self.ranks > 1 else [""]
        self.members = [Member(self.log, name) for name in names]

    def _as_done(
        self, call: str, pending: dict[str, Member], keep: Sequence[str]
    ) -> Iterator[tuple[str, Any]]:
        self.log.append(("wait", *sorted(pending)))
        yield from [(reference, None if reference in keep else reference) for reference in pending]


def test_the_next_bucket_is_gathered_while_the_last_is_received() -> None:
    transport = Transport()
    buckets: list[tuple[object, ...]] = [("a",), ("b",)]
    received = RayCluster.hand_over(
        cast(RayCluster, transport), Worker.weight_bucket, buckets, RolloutEngine.receive
    )
    first, second = "weight_bucket of a", "weight_bucket of b"
    assert transport.log == [
        ("call", "weight_bucket", "a"),
        ("wait", first),
        ("call", "receive", first),
        ("call", "weight_bucket", "b"),
        ("wait", f"receive of {first}", second),  # for both at once, and for no third
        ("call", "receive", second),
        ("wait", f"receive of {second}"),
    ]
    assert [*map(str, received)] == [f"receive of {first}", f"receive of {second}"]


def test_only_the_buckets_of_ranks_that_send_go_to_the_engines() -> None:
    """Ranks 1 and 2 of four have an engine on their cards."""
    transport = Transport(ranks=4)
    received = RayCluster.hand_over(
        cast(RayCluster, transport), Worker.weight_bucket, [("a",)], RolloutEngine.receive, (1, 2)
    )
    sent = [f"weight_bucket of a of rank {rank}" for rank in (1, 2)]
    assert ("call", "receive", *sent) in transport.log
    assert [*map(str, received)] == [f"receive of {', '.join(sent)}"]
